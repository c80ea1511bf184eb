"""The loop: from a config and prepared shards to a run folder, resuming where an earlier process stopped.

A step takes `accumulation` forward passes of `batch_size` sequences, over all processes; its loss is the mean
over every target that counts. After the step come, when due, the evaluation, the line of
metrics.jsonl and the checkpoint, in this order: whatever a checkpoint holds has already been logged.

Everything that a step depends on besides the weights (data, learning rate, random numbers) is a function of
the step number, so a run that is killed and resumed is identical to one that is not.
"""

import hashlib
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from headgate import config, files, ops
from headgate.config import Config
from headgate.data.loader import IGNORED, Loader, validation_windows
from headgate.data.shards import Split, open_split
from headgate.errors import HeadgateError
from headgate.machine import keep_memory, memory, memory_peak
from headgate.model.decoder import Decoder
from headgate.ops.documents import send_ids
from headgate.ops.gpu import send
from headgate.options import RunOptions
from headgate.progress import Progress, duration
from headgate.train import checkpoint
from headgate.train.distributed import World, hold_gradients, join
from headgate.train.evaluate import autocast, evaluate, rounded_products, write_document_losses
from headgate.train.folder import (
    DataRecord,
    RunFolder,
    check_fit,
    describe_data,
    describe_init,
    read_metrics,
)
from headgate.train.optim import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    make_optimizer,
    output_rates,
    set_learning_rate,
)
from headgate.train.summary import mechanisms_of, summarise
from headgate.train.trackers import Tracker, check_trackers, flat_values, make_trackers


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int
    signal: int | None
    """The signal that stopped it; None when the run is finished."""


def train(
    asked: Config,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: RunOptions | None = None,
    *,
    init: str | os.PathLike[str] | None = None,
) -> Outcome:
    """Train into the run folder `out`, or resume the run that it holds.

    A new run starts from the weights in `init`, if given: anything `headgate.load` reads.
    """
    options = options or RunOptions()
    keep_memory()
    check_trackers(options.track)
    with join(options.device) as world, ExitStack() as stack:
        stack.enter_context(rounded_products(asked.train.precision))
        world.share(asked.train.batch_size)  # raises if the batch cannot be shared evenly
        splits = [open_split(data, name, verify=world.is_first) for name in ("train", "val")]
        record = describe_data(data, *splits)
        check_fit(asked, record, *splits)
        run = RunFolder(out)
        run.refuse_strangers()
        if world.on_first(lambda: _is_finished(run, asked, record, init)):
            if world.is_first:
                steps = f"all {asked.train.steps:,} steps are done"
                print(f"{str(run.path)!r} is finished: {steps}", file=sys.stderr)
            return Outcome(asked.train.steps, None)
        refuse_too_large(asked, world, shard=options.shard)
        decoder = Decoder(asked.model, seed=asked.seed)
        first = world.on_first(lambda: _claim(run, asked, record, init, decoder, stack))
        trainer = Trainer(asked, options, world, run, decoder, splits)
        trainer.resume(first)
        return trainer.run()


class Trainer:
    def __init__(
        self,
        asked: Config,
        options: RunOptions,
        world: World,
        run: RunFolder,
        decoder: Decoder,
        splits: Sequence[Split],
    ) -> None:
        """`splits` are the one to train on and the one to evaluate on."""
        self.config, self.options, self.world, self.folder = asked, options, world, run
        self.decoder = decoder.to(world.device)
        self.decoder.recompute = options.recompute
        if options.compile:
            for layer in self.decoder.layers:
                layer.compile()
            for mechanism in mechanisms_of(self.decoder):
                # Documents taken one at a time keep changing length, and each length would be compiled anew.
                vars(mechanism)["_run_by_document"] = torch.compiler.disable(mechanism._run_by_document)
        self.model = world.wrap(self.decoder, shard=options.shard, precision=asked.train.precision)
        self.optimizer = make_optimizer(self.decoder, asked.train)
        self.parameters: list[Tensor] = list(self.decoder.parameters())
        self.output_rates = output_rates(self.decoder, asked.train)
        self.tokens, self.val = splits[0], validation_windows(splits[1], asked.train.context, asked.train)
        self._paths_before = Counter(ops.paths_taken())

    def resume(self, first: Path | None) -> None:
        """Start from the folder's latest checkpoint, or else from the weights in `first`, which rank 0
        names; every rank must call it."""
        train, world = self.config.train, self.world
        self.state = checkpoint.restore(self.folder, self.config, self.decoder, self.optimizer, world)
        if first is not None and not self.state.step:
            checkpoint.begin_with(first if world.is_first else None, self.decoder, world)
        self.loader = Loader(
            self.tokens,
            length=train.context,
            batch_size=world.share(train.batch_size),
            seed=self.config.seed,
            rank=world.rank,
            ranks=world.size,
            document_ids=train.documents == "mask",
            count_boundaries=train.boundaries == "count",
            packing=train.packing,
            state=self.state.loader,
        )
        world.on_first(lambda: _open_metrics(self.folder, self.state.step))
        self.saved_step = self.state.step
        self._saved_at = time.monotonic()
        self._paths_told = Counter(self.state.paths)
        self._clock = time.perf_counter()

    def run(self) -> Outcome:
        train, world = self.config.train, self.world
        with ExitStack() as stack:
            stop = stack.enter_context(_signals())
            progress = stack.enter_context(Progress(train.steps, self.state.step, shown=world.is_first))
            self._greet(progress)
            trackers: list[Tracker] = []
            if world.is_first:
                settings = config.to_dict(self.config)
                trackers = make_trackers(self.options.track, self.folder.path, settings, self.state.step)
            for tracker in trackers:
                stack.enter_context(closing(tracker))
            until = min(train.steps, self.options.until or train.steps)
            while self.state.step < until:
                line, stopping, save = self.step(stop)
                step = self.state.step
                loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
                progress.update(
                    step, f"step {step:,} of {train.steps:,}, loss {loss}", tokens=self.state.tokens
                )
                last = step == train.steps
                evaluated = last or step % train.evaluate_every == 0
                best = evaluated and self._evaluate(line, progress)
                if world.is_first and (evaluated or step % self.options.log_every == 0):
                    self._tell(line, trackers)
                every = self.options.save_every
                if save or stopping or best or step == until or (every and step % every == 0):
                    self.save()
                if stopping and not last:
                    self._part(progress, stopping)
                    return Outcome(step, stopping)
            if world.is_first and until == train.steps:
                self._finish(progress)
            elif world.is_first:
                progress.say(f"stopped after step {self.state.step:,}, as asked; it is saved")
        return Outcome(self.state.step, None)

    def step(self, stop: "Stop") -> tuple[dict[str, Any], int, bool]:
        """One optimiser step: its line of metrics, the signal asking to stop after it, whether to save."""
        train, world, number = self.config.train, self.world, self.state.step + 1
        torch.manual_seed(_step_seed(self.config.seed, number, world.rank))
        batches = [next(self.loader) for _ in range(train.accumulation)]
        counted = sum(int((batch[1] != IGNORED).sum()) for batch in batches)
        scale = world.size / max(1.0, world.sum([counted])[0])
        context = train.context_at(number)
        loss_sum = torch.zeros((), device=world.device)
        for n, batch in enumerate(batches):
            tokens, targets = (send(t.view(-1, context), world.device) for t in batch[:2])
            ids = [send_ids(t.view(-1, context), world.device) for t in batch[2:]]
            with hold_gradients(self.model, hold=n + 1 < len(batches)):
                with autocast(world.device, train.precision):
                    loss = self.model(
                        tokens,
                        targets,
                        documents=ids[0] if ids else None,
                        positions=train.document_positions,
                        count_boundaries=train.boundaries == "count",
                        reduction="sum",
                    )
                    loss = loss * scale
                loss.backward()
            loss_sum += loss.detach()
        late = time.monotonic() - self._saved_at > 60 * self.options.save_minutes
        # The ranks must agree on when to stop and save, and they meet here anyway to add up the loss.
        total, stopping, save = world.sum([loss_sum.item(), stop.signal > 0, late and world.is_first])
        loss_value = total / world.size
        norm = gradient_norm(self.parameters, self.output_rates)
        rate = learning_rate(number, train)
        finite = math.isfinite(loss_value) and math.isfinite(norm)
        if finite:
            clip_gradients(self.parameters, norm, train.clip)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        elif self.options.on_nonfinite == "stop":
            self._refuse_nonfinite(number, loss_value, norm)
        self.optimizer.zero_grad()
        tokens_of_step = train.batch_size * train.accumulation * train.context
        seconds = self._lap()
        self.state = replace(
            self.state,
            step=number,
            tokens=self.state.tokens + tokens_of_step,
            skipped=self.state.skipped + (not finite),
            loader=self.loader.state(),
            training_seconds=self.state.training_seconds + seconds,
        )
        line = {
            "step": number,
            "tokens": self.state.tokens,
            "seconds": round(self._seconds(), 4),
            "loss": loss_value if math.isfinite(loss_value) else None,
            "learning_rate": rate,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(tokens_of_step / max(seconds, 1e-9), 1),
            "memory_peak": memory_peak(world.device),
            "skipped": self.state.skipped,
        }
        if train.first_context is not None:
            line["context"] = context
        return line, (stop.signal or signal.SIGTERM) if stopping else 0, bool(save)

    def save(self) -> None:
        """Write the checkpoint of the current step, unless it exists."""
        if self.saved_step == self.state.step:
            return
        state = replace(
            self.state,
            memory_peak=max(self.state.memory_peak, memory_peak(self.world.device)),
            paths=dict(self._paths_told + (Counter(ops.paths_taken()) - self._paths_before)),
            threads=torch.get_num_threads(),
            processes=self.world.size,
            config=config.to_dict(self.config),
        )
        checkpoint.save(self.folder, state, self.decoder, self.optimizer, self.world, keep=self.options.keep)
        self.saved_step, self._saved_at = state.step, time.monotonic()
        self.state = replace(state, saving_seconds=state.saving_seconds + self._lap())

    def _evaluate(self, line: dict[str, Any], progress: Progress) -> bool:
        """Add the evaluation to the line; returns whether it is the best so far."""
        train = self.config.train
        result = evaluate(
            self.decoder,
            self.val,
            tokens=train.evaluate_tokens,
            batch_size=train.batch_size,
            precision=train.precision,
            positions=train.document_positions,
            world=self.world,
            by_document=self.state.step == train.steps,
            document_tokens=train.document_tokens,
        )
        if result.documents is not None and self.world.is_first:
            write_document_losses(self.folder.path, result.documents)
        validation = result.to_dict()
        line["gates"] = validation.pop("gates")
        line["validation"] = validation
        best = math.isfinite(result.loss) and (
            self.state.best_loss is None or result.loss < self.state.best_loss
        )
        if best:
            self.state = replace(self.state, best_step=self.state.step, best_loss=result.loss)
        self.state = replace(self.state, evaluating_seconds=self.state.evaluating_seconds + self._lap())
        note = ", the best so far" if best else ""
        progress.say(f"step {self.state.step:,}: validation loss {result.loss:.4f}{note}")
        return best

    def _tell(self, line: dict[str, Any], trackers: list[Tracker]) -> None:
        try:
            self.folder.log(line)
        except OSError as error:
            raise HeadgateError(
                f"{str(self.folder.path / 'metrics.jsonl')!r} cannot be written at step {line['step']}: "
                f"{error.strerror}; {self._last_good()}"
            ) from error
        if trackers:
            values = flat_values(line)
            for tracker in trackers:
                tracker.log(line["step"], values)

    def _greet(self, progress: Progress) -> None:
        state, model = self.state, self.config.model
        names = ", ".join(dict.fromkeys(spec.name for spec in model.mechanism))
        progress.say(
            f"{names}: {self.decoder.parameter_count():,} parameters, {self.config.train.steps:,} steps, "
            f"device {self.world.device}, processes {self.world.size}, threads {torch.get_num_threads()}"
        )
        if state.step:
            progress.say(f"resuming from step {state.step:,} of {str(self.folder.path)!r}")
            now = (torch.get_num_threads(), self.world.size)
            if now != (state.threads, state.processes):
                progress.say(
                    f"it was saved with {state.threads} threads in each of {state.processes} processes: "
                    "the order of additions changes, and with it the last digits of the results"
                )

    def _part(self, progress: Progress, number: int) -> None:
        progress.say(
            f"stopped by {signal.Signals(number).name} after step {self.state.step:,}, which is saved; "
            f"resume with: headgate train --out {self.folder.path}"
        )

    def _finish(self, progress: Progress) -> None:
        lines = [line for line in read_metrics(self.folder.path) if "validation" in line]
        if not lines:
            raise HeadgateError(
                f"{str(self.folder.path / 'metrics.jsonl')!r} has lost its evaluations, so no summary can be "
                "made; the model itself is intact"
            )
        last = lines[-1]
        best = next((line for line in lines if line["step"] == self.state.best_step), last)
        windows = self.loader.windows
        documents = windows.document_lengths() if windows.separate else None
        summary = summarise(self.config, self.decoder, self.state, last, best, self.world, documents)
        self.folder.write_summary(summary)
        progress.say(
            f"finished in {duration(self._seconds())}: validation loss {last['validation']['loss']:.4f}, "
            f"{summary['tokens_per_second']:,.0f} tokens/s; the run is in {str(self.folder.path)!r}"
        )

    def _refuse_nonfinite(self, number: int, loss: float, norm: float) -> None:
        what = f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        raise HeadgateError(
            f"at step {number} {what}; {self._last_good()}: lower train.learning_rate in another run, or "
            "continue with --on-nonfinite skip"
        )

    def _last_good(self) -> str:
        if not self.saved_step:
            return "there is no checkpoint yet"
        return (
            f"the last good checkpoint is {self.folder.checkpoints / checkpoint.folder_name(self.saved_step)}"
        )

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        self._clock, before = now, self._clock
        return now - before

    def _seconds(self) -> float:
        return self.state.training_seconds + self.state.evaluating_seconds + self.state.saving_seconds


class Stop:
    """Whether a signal has asked the run to stop after the current step."""

    signal = 0


@contextmanager
def _signals() -> Iterator[Stop]:
    """Inside, SIGTERM, SIGHUP and Ctrl-C are only noted; a second Ctrl-C stops at once.

    Under torchrun a second Ctrl-C arrives by itself, one from the terminal and one from torchrun, so there it
    does not mean hurry.
    """
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal and number == signal.SIGINT and "RANK" not in os.environ:
            raise KeyboardInterrupt
        stop.signal = number

    # A closing terminal sends SIGHUP; under nohup it is ignored, and stays ignored.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _claim(
    run: RunFolder,
    asked: Config,
    record: DataRecord,
    init: str | os.PathLike[str] | None,
    decoder: Decoder,
    stack: ExitStack,
) -> Path | None:
    """Claim the run folder; returns the file to start from, if the run has one and no checkpoint yet."""
    try:
        begun = None if init is None else describe_init(init)
        if begun is not None:
            checkpoint.check_init(Path(begun.file), decoder)
        stack.enter_context(files.locked(run.path, "trained"))
        if not run.begun:
            stack.push(lambda kind, error, trace: _forget_unless_begun(run, error))
        stack.callback(run.close)
        run.claim(asked, record, begun)
        run.sweep()
        return Path(begun.file) if begun is not None else _first_weights(run, decoder)
    except OSError as error:
        raise HeadgateError(
            f"{str(error.filename or run.path)!r} cannot be written: {error.strerror}"
        ) from error


def _open_metrics(run: RunFolder, step: int) -> None:
    try:
        run.open_metrics(step)
    except OSError as error:
        path = run.path / "metrics.jsonl"
        raise HeadgateError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def refuse_too_large(asked: Config, world: World, *, shard: bool = False) -> None:
    """Raise, before anything is allocated, if what training holds at the very least cannot fit the memory:
    weights, gradients and the optimiser's state, each layer's input and a step's tokens."""
    model, train = asked.model, asked.train
    with torch.device("meta"):
        few = Decoder(replace(model, n_layers=min(model.n_layers, len(model.mechanism))))
    layers = sum(p.numel() for p in few.layers.parameters())
    parameters = few.parameter_count() + layers * (model.n_layers - len(few.layers)) // len(few.layers)
    on_gpu = world.device.type == "cuda"
    held = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else memory()
    tokens = world.share(train.batch_size) * train.context
    number = 2 if train.precision == "bf16" else 4
    needed = 16 * parameters // (world.size if shard else 1)
    needed += tokens * model.d_model * model.n_layers * number
    if not on_gpu:
        needed += tokens * train.accumulation * 16  # as they come from the loader: tokens and targets
    if needed > held:
        raise HeadgateError(
            f"a model of {parameters:,} parameters, trained on {tokens * train.accumulation:,} tokens a "
            f"step, needs at least {needed / 1e9:,.0f} GB, and {world.device} has {held / 1e9:,.0f} GB; "
            "headgate plan shows what fits"
        )


def _is_finished(
    run: RunFolder, asked: Config, record: DataRecord, init: str | os.PathLike[str] | None
) -> bool:
    """Whether nothing is left to do; writes nothing, since a finished run may be on a read-only disk."""
    if not run.begun or not run.summary.is_file():
        return False
    run.refuse_another(asked, record, None if init is None else describe_init(init))
    try:
        run.read_summary()
    except HeadgateError:
        return False  # it will be made again from the checkpoint
    steps = checkpoint.saved_steps(run)
    return bool(steps) and steps[-1] >= asked.train.steps


def _forget_unless_begun(run: RunFolder, error: BaseException | None) -> None:
    """A run that failed before its first step leaves nothing behind to get in the way."""
    if error is not None and not checkpoint.saved_steps(run) and not read_metrics(run.path):
        run.forget()


def _first_weights(run: RunFolder, decoder: Decoder) -> Path | None:
    """The file that a run without a checkpoint starts from, if any; it must not have changed."""
    begun = run.init()
    if begun is None or checkpoint.saved_steps(run):
        return None
    if not Path(begun.file).is_file() or describe_init(begun.file) != begun:
        raise HeadgateError(
            f"{str(run.path)!r} has no checkpoint yet, and the weights it started from are no longer in "
            f"{begun.file!r}; put them back, or start another run"
        )
    checkpoint.check_init(Path(begun.file), decoder)
    return Path(begun.file)


def _step_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
