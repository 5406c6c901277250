"""`compare_live(engine, settings)`: one prompt under two to eight settings, in one batch, streaming side by side.

When all have ended the first setting runs once more, alone: the null pair, under which nothing is shown as a
difference (see `workbench.live.compare`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitlets import List, Unicode

from workbench.adapters.merging import merged_of
from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.live.compare import was_first, why_unfinished
from workbench.live.playing import Playing
from workbench.live.sender import Sender
from workbench.live.settings import WHO, require_comparable, settings_of
from workbench.live.voices import Voice, find, voice_of, voices
from workbench.live.widget import Live, require_engine, text_of

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine

_NUMBERS = itertools.count(1)


class Round:
    """One run of all settings.

    Attributes:
        columns: label -> what plays there.
        null: the first setting's second run, once it has begun.
        is_stopped: somebody has ended it; then there is no null pair.
        ended: what the pages were told at the very end; None until then.
    """

    def __init__(self, number: int, columns: dict[str, Playing]):
        self.number, self.columns = number, columns
        self.null: Playing | None = None
        self.is_stopped = False
        self.ended: dict[str, Any] | None = None

    @property
    def playing(self) -> list[Playing]:
        """Everything of it that has begun."""
        return [*self.columns.values(), *([self.null] if self.null is not None else [])]

    def divergences(self) -> list[int | None]:
        """Return, per column, the first token as shown in which its text differs from the first one's; None if none."""
        first, *others = self.columns.values()
        mine = first.feed.generated_ids
        found: list[int | None] = [None]
        for other in others:
            pairs = enumerate(zip(mine, other.feed.generated_ids, strict=False))
            at = next((index for index, (one, another) in pairs if one != another), None)
            found.append(None if at is None else at + other.feed.prompt_tokens - other.feed.hidden)
        return found


class CompareLive(Live):
    """Settings side by side: see `compare_live`.

    Attributes:
        prompt: the text in the prompt box.
        completions: label -> result of the last run.
    """

    prompt = Unicode().tag(sync=True)
    columns = List().tag(sync=True)

    def __init__(self, engine: Engine, settings: dict[str, dict[str, Any]], prompt: str, title: str, theme: str,
                 null: bool):
        self._settings, self._null = settings, null
        self._name, self._number = f"compare-live-{next(_NUMBERS)}", 0
        self._round: Round | None = None
        self._comparison: Comparison | None = None
        self._reason = "nothing has run here yet; run() starts it"
        self.completions: dict[str, Completion] = {}
        super().__init__(engine, "compare_live", title, theme, prompt=text_of("prompt", prompt),
                         columns=[{"label": label} for label in settings])

    @property
    def is_running(self) -> bool:
        """Whether any setting, or the null pair, runs."""
        return self._round is not None and self._round.ended is None

    def run(self, prompt: str | None = None) -> None:
        """Start every setting on the prompt and return at once; `wait` returns the comparison.

        Args:
            prompt: replaces what is in the prompt box.

        Raises:
            UserError: a setting that cannot run, by its label; or they run already.
        """
        with self._lock:
            if self._is_over:
                raise UserError("this comparison is closed; make a new one")
            if self.is_running:
                raise UserError("the settings run already; stop them first")
            if prompt is not None:
                self.prompt = text_of("prompt", prompt)
            number = self._number + 1
            current = Round(number, self._begin(number))
            self._number, self._round, self.completions, self._comparison = number, current, {}, None
            self._done.clear()
            self.tell(self._started(current))
            sender = Sender(lambda: self._update(current, sender))
            for playing in current.playing:
                playing.poke = sender.poke
            sender.poke()

    def stop(self) -> None:
        """End every setting now; what they have said stays. No error if none runs."""
        current = self._round
        if current is not None and current.ended is None:
            current.is_stopped = True
            for playing in current.playing:
                playing.cancel()

    def wait(self, timeout_s: float | None = None) -> Comparison:
        """Wait for the end of the run, null pair included, and return the comparison.

        Raises:
            UserError: nothing has run here, or too little to compare.
            TimeoutError: it has not ended after `timeout_s` seconds; it goes on.
        """
        if self._round is not None and not self._done.wait(timeout_s):
            raise TimeoutError(f"the settings have not ended after {timeout_s} s; they go on")
        return self.comparison

    @property
    def comparison(self) -> Comparison:
        """The last run's comparison.

        Raises:
            UserError: nothing has run here, or fewer than two settings ran to their end.
        """
        if self._comparison is None:
            raise UserError(self._reason)
        return self._comparison

    def show(self) -> Any:
        """Return the picture of the last run's comparison: static and self-contained."""
        from workbench.display import show

        return show(self.comparison, title=self.title)

    def save(self, path: str | Path) -> Path:
        """Write that picture to a file and return its path."""
        return self.show().save(path)

    def __repr__(self) -> str:
        state = "closed" if self._is_over else "running" if self.is_running else f"{self._number} runs"
        return f"CompareLive({len(self._settings)} settings on base {self.engine.base_id!r}, {state})"

    def _begin(self, number: int) -> dict[str, Playing]:
        """Queue every setting, all before the first step, or none."""
        columns: dict[str, Playing] = {}
        last = list(self._settings)[-1]
        try:
            for place, (label, options) in enumerate(self._settings.items()):
                columns[label] = self._queued(f"{self._name}.{number}-{place}", number, options, label == last)
        except BaseException as error:
            for playing in columns.values():
                playing.cancel()
                playing.close()
            if isinstance(error, UserError):
                raise UserError(f"setting {list(self._settings)[len(columns)]!r}: {error}") from None
            raise
        return columns

    def _queued(self, request_id: str, number: int, options: Mapping[str, Any], is_last: bool, **more: Any) -> Playing:
        playing = Playing(self.engine, number, request_id, voice_for(self.engine, options), ("scalings",))
        try:
            own = {name: value for name, value in options.items() if name not in WHO}
            edits = own.pop("edits", None)
            if edits is not None:
                playing.resources.callback(self.engine.edit(edits, requests=[request_id]).close)
            playing.begin(self.prompt, {**own, **more}, is_last)
        except BaseException:
            playing.close()
            raise
        return playing

    def _update(self, current: Round, sender: Sender) -> bool:
        """Send what is new; on the sender's thread. Then the null pair, then the end."""
        for playing in current.playing:
            playing.catch_up()
        over = [playing.feed.is_ended for playing in current.columns.values()]
        try:
            with self._sending:
                self._send_news(current, over)
        except Exception as error:
            self.say(f"the streams cannot be shown: {type(error).__name__}: {error}", is_error=True)
        for label, playing in current.columns.items():
            if fault := playing.fault():
                self.say(f"setting {label!r}: {fault}", is_error=True)
        if not all(over) or (current.null is not None and not current.null.feed.is_ended):
            return True
        if current.null is None and self._wants_null(current) and self._begin_null(current, sender):
            return True
        self._finish(current)
        return False

    def _send_news(self, current: Round, over: Sequence[bool], page: str = "") -> None:
        columns, buffers = [], []
        for index, (playing, is_over) in enumerate(zip(current.columns.values(), over, strict=True)):
            content, own = playing.news(is_whole=bool(page))
            if is_over:
                playing.ended = content["ended"] = playing.ending()
            columns.append({**content, "column": index})
            buffers += own
        content = {"type": "more", "run": current.number, "columns": columns, "diverged": current.divergences()}
        self.tell({**content, **({"page": page} if page else {})}, buffers)

    def _wants_null(self, current: Round) -> bool:
        return self._null and not current.is_stopped and _reason(next(iter(current.columns.values()))) is None

    def _begin_null(self, current: Round, sender: Sender) -> bool:
        """Start the first setting once more; prompt log-probabilities keep it from reading the first run's KV."""
        options = next(iter(self._settings.values()))
        try:
            current.null = self._queued(
                f"{self._name}.{current.number}-null", current.number, options, True, prompt_logprobs=True
            )
        except UserError as error:
            self.say(f"the null pair cannot run: {error}", is_error=True)
            return False
        current.null.poke = sender.poke
        sender.poke()
        self.say("Running the first setting once more, alone: what batch shape alone changes …")
        return True

    def _finish(self, current: Round) -> None:
        failed = {label: reason for label, playing in current.columns.items() if (reason := _reason(playing))}
        traces = {}
        for label, playing in current.columns.items():
            trace, why = playing.trace()
            if label not in failed and trace is not None:
                traces[label] = trace
            elif label not in failed:
                failed[label] = why
        with self._lock:
            self.completions = {label: playing.completion for label, playing in current.columns.items()}
            null = current.null.trace()[0] if current.null is not None and _reason(current.null) is None else None
            self._compare(traces, null, failed)
            for playing in current.playing:
                playing.close()
            current.ended = self._ending(current)
            self._done.set()
        self.tell(current.ended)

    def _compare(self, traces: dict[str, Any], null: Any, failed: dict[str, str]) -> None:
        self._comparison = None
        if len(traces) < 2:
            said = "; ".join(f"{label!r}: {reason}" for label, reason in failed.items())
            count = f"{len(traces)} of {len(self._settings)}"
            self._reason = f"{count} settings ran to their end, and two are needed to compare. {said}"
            return
        try:
            missed = was_first(self._settings, traces)
            self._comparison = Comparison.of(traces, null if missed is None else None, failed, missed)
        except UserError as error:
            self._reason = str(error)

    def _ending(self, current: Round) -> dict[str, Any]:
        found = self._comparison
        says = [found.says(label) if found is not None and label in found.labels else "" for label in self._settings]
        note = found.stand_in() if found is not None else ""
        summary = (f"{note}. " if note else "") + (found.floor_says() if found is not None else self._reason)
        return {"type": "end", "run": current.number, "says": says, "floor": summary, "compared": found is not None}

    def _started(self, current: Round) -> dict[str, Any]:
        palette = list(dict.fromkeys(name for each in current.columns.values() for name in each.voice.adapters))
        return {
            "type": "start", "run": current.number,
            "columns": [playing.started(palette) for playing in current.columns.values()],
        }

    def _on_hello(self, content: dict[str, Any]) -> None:
        super()._on_hello(content)
        current, page = self._round, str(content.get("page"))
        if current is None:
            return
        with self._sending:
            self.tell({**self._started(current), "page": page})
            self._send_news(current, [each.feed.is_ended for each in current.columns.values()], page)
            if current.ended is not None:
                self.tell({**current.ended, "page": page})

    def _on_run(self, content: dict[str, Any]) -> None:
        self._take_typed(content, ("prompt",))
        self.run()

    def _on_stop(self, _: dict[str, Any]) -> None:
        self.stop()


def voice_for(engine: Engine, options: Mapping[str, Any]) -> Voice:
    """Return who answers under a setting: whom it names, else the base model."""
    known = voices(engine, merged_of(options.get("merged_adapters")))
    named = any(options.get(kind) is not None for kind in WHO)
    return voice_of(options, known) if named else find("base", known)


def _reason(playing: Playing) -> str | None:
    """Return why an ended request has no result to compare, or None."""
    return why_unfinished(playing.completion)


def _seeded(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a seed: left out, each column would get noise of its own."""
    has_seed = options.get("seed") is not None or getattr(options.get("sampling"), "seed", None) is not None
    return dict(options) if has_seed else {**options, "seed": engine.config.seed}


def compare_live(
    engine: Engine, settings: Any = None, prompt: str = "", *, title: str = "Settings side by side",
    theme: str = "auto", null: bool = True, **common: Any,
) -> CompareLive:
    """Return a widget that runs one prompt under several settings at once, in one batch, and streams them side by side.

    Each token is coloured by its leading adapter, and the first token in which a column differs from the first one is
    marked. Afterwards `.comparison`, `.completions`, `.show()` and `.save(path)` have what ran.

    Args:
        engine: runs the requests; they share its batches with everybody else's.
        settings: two to eight: label -> options of `Engine.submit` (and `edits`, as for `Engine.edit`), or a list of
            options, which are labelled by what differs. None: one of `common` is a list, a setting per value.
        prompt: what the prompt box holds at first.
        title: the heading.
        theme: "auto" (the notebook's), "light" or "dark".
        null: run the first setting again, alone, for the floor under which nothing is a difference.
        **common: options of every setting. Without a `seed`, all have the engine's.

    Raises:
        UserError: settings that cannot be compared, an unknown option, or one out of its range.
    """
    require_engine(engine)
    each = {label: _seeded(engine, options) for label, options in settings_of(settings, common).items()}
    require_comparable(engine, each)
    for label, options in each.items():
        try:
            voice_for(engine, options)
        except UserError as error:
            raise UserError(f"setting {label!r}: {error}") from None
    return CompareLive(engine, each, prompt, title, theme, null)
