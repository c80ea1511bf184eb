"""What every page shares: templates that escape, data that cannot end a script, and the scripts that draw.

Text goes through the template, which escapes it, or into JSON inside the page, where no character can end the
script, and scripts insert it as text. So a label with markup in it shows as it was written. A page may run
its own scripts but cannot create any: Vega interprets its expressions.
"""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from headgate.report.looks import COLOURS, DARK_COLOURS, DARK_PAPER, PAPER
from headgate.report.painting import PageFigure
from headgate.report.publish import standing_alone
from headgate.report.words import (
    bytes_in_words,
    decimal,
    p_in_words,
    percent,
    percent_ends,
    with_real_minus,
    with_sign,
)
from headgate.version import __version__


def render(
    template: str, made: Mapping[str, PageFigure], first: str, data: Mapping[str, Any], **names: Any
) -> str:
    """A page with these figures, one of which is also a picture that needs no script; `data` is what page.js
    also reads."""
    whole = {
        "colours": dict(zip((*COLOURS, PAPER), (*DARK_COLOURS, DARK_PAPER), strict=True)),
        "figures": {figure.name: _drawn(figure) for figure in made.values()},
        **data,
    }
    return (
        _environment()
        .get_template(template)
        .render(
            figures=made,
            stills={first: _still(made[first])} if first in made else {},
            data=Markup(_script_json(whole)),  # noqa: S704 - every < in it is escaped
            vega=Markup(_vega()),  # noqa: S704 - the library's own file, nothing of a study's
            version=__version__,
            **names,
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """With the templates that it has compiled."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headgate.report", "."),
        autoescape=jinja2.select_autoescape(default=True, disabled_extensions=("css", "js")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "signed": with_sign,
        "minus": with_real_minus,
        "dense": lambda text: "\n".join(line for line in text.splitlines() if line.strip()),
        "percent": percent,
        "to": percent_ends,
        "number": decimal,
        "p": p_in_words,
        "bytes": bytes_in_words,
    }
    return environment


def _drawn(figure: PageFigure) -> dict[str, Any]:
    """Its views as the page's script reads them; seven digits are enough for a picture and its table."""
    return {
        name: {
            "spec": _rounded(view.spec),
            "columns": view.columns,
            "caption": view.caption,
            "key": view.key,
            "description": f"{figure.title}{f': {name}' if name else ''}. {view.caption}",
        }
        for name, view in figure.views.items()
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _still(figure: PageFigure) -> Markup:
    """The first view as a picture that needs no script."""
    drawing = standing_alone(next(iter(figure.views.values())).spec)
    drawing["config"]["aria"] = False  # a description of each mark is useless beside the caption
    svg: str = vl_convert.vegalite_to_svg(drawing)
    numbers: dict[str, str] = {}  # vl-convert continues counting from one drawing to the next
    svg = re.sub(r"\bclip\d+", lambda found: numbers.setdefault(found[0], f"still{len(numbers)}"), svg)
    return Markup(svg)  # noqa: S704 - Vega escapes the texts in its drawings


def _vega() -> str:
    """The scripts that draw, Vega and its companions, as one module."""
    bundle: str = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]
    return bundle.replace("</script", "<\\/script")


def _script_json(data: Any) -> str:
    """JSON for a script element: nothing in it can close the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
