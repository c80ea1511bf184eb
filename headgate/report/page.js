"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const printing = window.matchMedia("print");
  const views = new Map();
  const chosen = new Map(Object.entries(data.figures).map(([name, all]) => [name, Object.keys(all)[0]]));
  const boxes = [...document.querySelectorAll("[data-variant]")];
  const make = (tag, text, attributes) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return element;
  };
  let hidden = [];

  // Figures.
  function isDark() { return dark.matches && !printing.matches; }
  function shade(text) {
    if (!isDark()) return text;
    for (const [light, other] of Object.entries(data.colours)) text = text.replaceAll(light, other);
    return text;
  }
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const size = window.innerWidth > 640 ? 12 : 11;
    const text = { labelColor: of("--soft"), titleColor: of("--ink"), labelFontSize: size, titleFontSize: size, titleFontWeight: "normal" };
    return {
      background: "transparent", font: "system-ui, sans-serif", view: { stroke: "transparent" },
      axis: { ...text, gridColor: of("--line"), domainColor: of("--edge"), tickColor: of("--edge"), gridOpacity: 0.6 },
      legend: text, rule: { color: of("--soft") }, text: { color: of("--soft") },
    };
  }
  async function draw(name) {
    const view = data.figures[name][chosen.get(name)];
    const place = document.getElementById("chart-" + name);
    const spec = JSON.parse(shade(JSON.stringify(view.spec)));
    spec.description = view.description;
    if (printing.matches) spec.width = 640; // a sheet, whatever the window was
    document.getElementById("caption-" + name).textContent = view.caption;
    if (views.has(name)) views.get(name).finalize();
    // Only errors are logged: a figure whose variants are all hidden is empty, which is not an error.
    // Expressions are interpreted, not compiled, so that the page needs no permission to run generated code.
    const result = await vegaEmbed(place, spec, { actions: false, ast: true, renderer: "svg", logLevel: 1, config: theme(), tooltip: { theme: isDark() ? "dark" : "light" } });
    views.set(name, result);
    hide(result.view);
    explain(name);
    tabulate(name);
  }
  // What its colours, dashes and shapes stand for.
  function explain(name) {
    const list = document.getElementById("key-" + name), view = data.figures[name][chosen.get(name)];
    if (!list) return;
    const there = new Set(view.key ? view.spec.datasets.rows.map((row) => row.label) : []);
    const shown = boxes.filter((box) => box.checked && there.has(data.labels[Number(box.dataset.variant)]));
    list.replaceChildren(...shown.map((box) => {
      const item = make("li");
      item.append(box.parentElement.querySelector(".swatch").cloneNode(true), data.labels[Number(box.dataset.variant)]);
      return item;
    }));
    list.hidden = !shown.length;
  }
  function hide(view) {
    try { view.signal("hidden", hidden).run(); } catch (error) { /* a figure without variants has no such signal */ }
  }
  function drawAll() {
    for (const swatch of document.querySelectorAll("[data-colour]")) swatch.style.color = shade(swatch.dataset.colour);
    return Promise.all([...chosen.keys()].map(draw));
  }
  for (const radio of document.querySelectorAll("[data-figure]")) {
    radio.addEventListener("change", () => { chosen.set(radio.dataset.figure, radio.value); draw(radio.dataset.figure); });
  }
  dark.addEventListener("change", drawAll);
  printing.addEventListener("change", drawAll);

  // Which variants they show.
  function choose() {
    hidden = boxes.filter((box) => !box.checked).map((box) => data.labels[Number(box.dataset.variant)]);
    document.getElementById("shown").textContent = (boxes.length - hidden.length) + " of " + boxes.length;
    for (const [name, result] of views) { hide(result.view); explain(name); }
  }
  for (const box of boxes) box.addEventListener("change", choose);
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      const show = { all: () => true, none: () => false, mechanisms: (box) => !("ablation" in box.dataset) }[button.dataset.show];
      for (const box of boxes) box.checked = show(box);
      choose();
    });
  }
  choose();
  // A link's target is placed below the line that stays in view.
  const chooser = document.getElementById("variants");
  new ResizeObserver(() => {
    document.documentElement.style.scrollPaddingTop = chooser.querySelector("summary").offsetHeight + 12 + "px";
  }).observe(chooser);

  // The numbers behind a figure, made when they are asked for.
  function tabulate(name) {
    const box = document.querySelector('[data-table="' + name + '"]');
    if (!box || !box.open) return;
    const { spec, columns } = data.figures[name][chosen.get(name)], locale = views.get(name).view.locale();
    const shaped = (value, format) => (value === null || value === undefined ? "" : format ? locale.format(format)(value) : String(value));
    const table = make("table"), head = make("tr"), body = make("tbody");
    for (const [, title, format] of columns) head.append(make("th", title.trim(), { scope: "col", class: format ? "n" : "" }));
    for (const row of spec.datasets.rows) {
      const line = make("tr");
      for (const [field, , format] of columns) line.append(make("td", shaped(row[field], format), { class: format ? "n" : "" }));
      body.append(line);
    }
    const thead = make("thead");
    thead.append(head);
    table.append(thead, body);
    const scroll = make("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of the figure " + name });
    scroll.append(table);
    const save = make("button", "save as CSV", { type: "button", class: "save" });
    save.addEventListener("click", () => saveAs(name + ".csv", [columns.map(([, title]) => title.trim()), ...spec.datasets.rows.map((row) => columns.map(([field]) => row[field] ?? ""))]));
    const tools = make("div", undefined, { class: "tools" });
    tools.append(save);
    box.replaceChildren(box.querySelector("summary"), tools, scroll);
  }
  for (const box of document.querySelectorAll("[data-table]")) box.addEventListener("toggle", () => tabulate(box.dataset.table));
  function saveAs(name, rows) {
    const cell = (value) => { const text = String(value); return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text; };
    const link = make("a", undefined, { download: name });
    link.href = URL.createObjectURL(new Blob([rows.map((row) => row.map(cell).join(",") + "\n").join("")], { type: "text/csv" }));
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // The table of every variant; the page of a suite has another.
  const search = document.getElementById("filter"), unfold = document.getElementById("unfold");
  const lines = [...document.querySelectorAll("[data-row]")];
  const isOpen = (button) => button.getAttribute("aria-expanded") === "true";
  function sift() {
    const asked = search.value.trim().toLowerCase();
    let found = 0;
    for (const line of lines) {
      const fold = line.parentElement.querySelector(".fold"), detail = line.querySelector(".open");
      const folded = line.classList.contains("ablation") && fold && !isOpen(fold);
      line.hidden = asked ? !data.labels[Number(line.dataset.row)].toLowerCase().includes(asked) : Boolean(folded);
      found += !line.hidden;
      if (detail) document.getElementById(detail.getAttribute("aria-controls")).hidden = line.hidden || !isOpen(detail);
    }
    document.getElementById("found").textContent = asked ? found + " of " + lines.length + " variants" : "";
  }
  if (search) search.addEventListener("input", sift);
  for (const button of document.querySelectorAll(".open, .fold")) {
    button.addEventListener("click", () => { button.setAttribute("aria-expanded", String(!isOpen(button))); sift(); });
  }
  if (unfold) {
    unfold.addEventListener("click", () => {
      const open = unfold.getAttribute("aria-pressed") !== "true";
      unfold.setAttribute("aria-pressed", String(open));
      for (const button of document.querySelectorAll(".fold")) button.setAttribute("aria-expanded", String(open));
      sift();
    });
  }
  document.getElementById("save").addEventListener("click", () => saveAs(data.file, data.table));

  // Commands.
  for (const block of document.querySelectorAll(".block")) {
    const button = make("button", "copy", { type: "button", class: "copy" }), pre = block.querySelector("pre");
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(pre.textContent.trimEnd()); } catch (error) {
        getSelection().selectAllChildren(pre);
        document.execCommand("copy");
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    pre.tabIndex = 0;
    block.append(button);
  }

  // The gates on a passage.
  function passage() {
    const text = data.passage, box = document.getElementById("passage");
    if (!text || !box) return;
    const [variant, layer, head] = ["variant", "layer", "head"].map((name) => document.getElementById("passage-" + name));
    const fill = (select, names) => {
      const before = select.value;
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      if (names.includes(before)) select.value = before;
    };
    fill(variant, Object.keys(text.variants));
    const update = () => {
      const layers = text.variants[variant.value];
      fill(layer, Object.keys(layers));
      fill(head, layers[layer.value].map((_, n) => String(n)));
      const gates = layers[layer.value][Number(head.value)];
      const low = Math.min(...gates), high = Math.max(...gates);
      box.replaceChildren(...text.tokens.map((token, n) => {
        const span = make("span", token, { title: "gate " + (gates[n] / 1000).toFixed(3) });
        const strength = high > low ? (gates[n] - low) / (high - low) : 0.5;
        span.style.backgroundColor = "rgba(var(--mark), " + (0.55 * strength).toFixed(3) + ")";
        return span;
      }));
      document.getElementById("passage-note").textContent =
        "The stronger the colour, the more open the gate: from " + (low / 1000).toFixed(3) + " to " + (high / 1000).toFixed(3) + " on this passage.";
    };
    for (const select of [variant, layer, head]) select.addEventListener("change", update);
    update();
  }
  passage();
  window.addEventListener("vega-ready", () => drawAll().then(() => { document.documentElement.dataset.ready = "yes"; }));
})();
