"""`console(engine)`: a prompt, an answer that streams in the colours of its adapters, and a fader for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Dict, List, Unicode, observe

from workbench.adapters.merging import merged_of
from workbench.display.palette import adapter_key
from workbench.engine.options import split_options
from workbench.errors import UserError
from workbench.live.desk import RANGES, Desk
from workbench.live.playing import Playing
from workbench.live.sender import Sender
from workbench.live.voices import Voice, also, defaults_of, find, shown_values, typed, voice_of, voices
from workbench.live.widget import Live, require_engine, text_of

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine import Completion, Engine
    from workbench.instrument.trace import Trace

_WHO = ("mixture", "adapter", "merged_adapters")
_REUSE = ("policy", "tgt_non_granular_index")


class Console(Live):
    """A console on an engine: see `console`. Its traits are what is typed on the page.

    Attributes:
        prompt: the text in the prompt box.
        voice: who answers: "mixture:demo", "adapter:german", "base".
        values: number boxes by name, as text.
        chat: send the prompt as a user's message, through the base's chat template.
        completion: the last run's result; None before.
    """

    prompt = Unicode().tag(sync=True)
    voice = Unicode().tag(sync=True)
    values = Dict().tag(sync=True)
    chat = Bool(False).tag(sync=True)
    voices = List().tag(sync=True)
    boxes = List().tag(sync=True)
    also = Unicode().tag(sync=True)
    can_chat = Bool(False).tag(sync=True)
    faders = Dict().tag(sync=True)
    _count = 0

    def __init__(self, engine: Engine, prompt: str, title: str, theme: str, chat: bool, record: Sequence[str],
                 defaults: dict[str, Any]):
        require_engine(engine)
        self._merged = merged_of(defaults.get("merged_adapters"))
        self._sampling, self._others = defaults_of(defaults)
        self._record = (record,) if isinstance(record, str) else tuple(record)
        known = voices(engine, self._merged)
        boxes = shown_values(self._sampling, self._others)
        self._desk = Desk(engine)
        self._playing: Playing | None = None
        self._number, self.completion, self._trace, self._untraced = 0, None, None, ""
        Console._count += 1
        self._name = f"console-{Console._count}"
        super().__init__(
            engine, "console", title, theme, prompt=text_of("prompt", prompt), chat=chat,
            voice=voice_of(self._others, known).id, voices=[voice.to_json() for voice in known],
            boxes=boxes, values={box["name"]: box["value"] for box in boxes},
            also=also(self._sampling, self._others), can_chat=bool(getattr(engine.tokenizer, "chat_template", None)),
        )
        self._choose()

    @property
    def is_running(self) -> bool:
        """Whether it is answering."""
        return self._playing is not None and not self._playing.done.is_set()

    def run(self, prompt: str | None = None, **options: Any) -> None:
        """Start an answer and return at once; `wait` returns it.

        Args:
            prompt: replaces what is in the prompt box.
            **options: of `Engine.submit`, for this run alone.

        Raises:
            UserError: as for `Engine.submit`; or it is answering already.
        """
        with self._lock:
            if self._is_over:
                raise UserError("this console is closed; make a new one")
            if self.is_running:
                raise UserError("this console is answering already; stop it first")
            if prompt is not None:
                self.prompt = text_of("prompt", prompt)
            voice, asked = self._asked(options)
            self._play(voice, asked)

    def stop(self) -> None:
        """End the answer now; what it has said stays. No error if there is none."""
        playing = self._playing
        if playing is not None and not playing.done.is_set():
            playing.cancel()

    def wait(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end of the run and return its result.

        Raises:
            UserError: nothing has run here.
            TimeoutError: it has not ended after `timeout_s` seconds; it goes on.
        """
        if self._playing is None:
            raise UserError("nothing has run in this console yet; run() starts it")
        if not self._playing.done.wait(timeout_s):
            raise TimeoutError(f"the answer has not ended after {timeout_s} s; it goes on")
        return self.completion

    def set_fader(self, adapter: str, value: float, mode: str | None = None) -> None:
        """Move an adapter's fader; the running request feels it from its next token on.

        Args:
            adapter: of the mixture that answers.
            value: for "bias" -4 to 4, added to the adapter's logit (0 leaves it alone); for "force" 0 to 1, its weight.
            mode: "bias" or "force"; by default the one in use. Another one puts all other faders to rest.
        """
        with self._lock:
            self._require_faders()
            self._desk.set(adapter, value, self._desk.mode if mode is None else mode, *self._now())
            self._show_faders()

    def clear_faders(self, adapter: str | None = None) -> None:
        """Put one fader, or all, to rest: the classifier's own scalings again."""
        with self._lock:
            self._desk.clear(adapter, *self._now())
            self._show_faders()

    @property
    def history(self) -> pd.DataFrame:
        """What was moved when: run, request_id, time_s, token, adapter, mode, value (NaN: put to rest)."""
        import pandas as pd

        columns = ["run", "request_id", "time_s", "token", "adapter", "mode", "value"]
        return pd.DataFrame([move.to_dict() for move in self._desk.moves], columns=columns).astype({"value": float})

    @property
    def trace(self) -> Trace:
        """The last run's trace; its metadata says which faders were moved.

        Raises:
            UserError: nothing has run here, or what ran has no trace.
        """
        if self._trace is None:
            raise UserError(self._untraced or "nothing has run in this console yet; run() starts it")
        return self._trace

    def explore(self) -> Any:
        """Return the interactive view of the last run's trace."""
        from workbench.display import explore

        return explore(self.trace)

    def show(self) -> Any:
        """Return the picture of the last run's trace: static and self-contained."""
        from workbench.display import show

        return show(self.trace, title=self.title)

    def save(self, path: str | Path) -> Path:
        """Write that picture to a file (.html, .png, .svg, .pdf) and return its path."""
        return self.show().save(path)

    def refresh(self) -> None:
        """Look again at what the engine has loaded."""
        with self._lock:
            known = voices(self.engine, self._merged)
            listed = [voice.to_json() for voice in known]
            if listed == self.voices:
                return
            gone = self.voice not in [voice.id for voice in known]
            self.voices = listed
            if gone and not self.is_running:
                before, self.voice = self.voice, known[0].id
                self.say(f"{before.partition(':')[2]!r} is not loaded; now chosen: {listed[0]['label']}", is_error=True)
            self._choose()

    def __repr__(self) -> str:
        state = "closed" if self._is_over else "answering" if self.is_running else f"{self._number} runs"
        return f"Console(base {self.engine.base_id!r}, {self.voice!r}, {state})"

    @observe("voice")
    def _voice_changed(self, _: object) -> None:
        if hasattr(self, "_desk"):
            self._choose()

    def _choose(self) -> None:
        """Put the chosen voice's adapters on the faders, unless they are in use."""
        # the end of a run chooses on the sender's thread, where the next run may begin meanwhile
        with self._lock:
            if self.is_running:
                return
            chosen = next((v for v in voices(self.engine, self._merged) if v.id == self.voice), None)
            self._desk.choose(chosen.adapters if chosen is not None and chosen.is_mixture else ())
            self._show_faders()

    def _asked(self, options: dict[str, Any]) -> tuple[Voice, dict[str, Any]]:
        """Return who is to answer, and what `Engine.submit` is to be asked with."""
        known = voices(self.engine, merged_of(options.get("merged_adapters")) or self._merged)
        named = any(options.get(kind) is not None for kind in _WHO)
        voice = voice_of(options, known) if named else find(self.voice, known)
        # how scalings are reused is a question to a mixture only; the page greys it out for the others
        idle = _WHO if voice.is_mixture else (*_WHO, *_REUSE)
        others = {name: value for name, value in self._others.items() if name not in idle}
        boxes = {name: text for name, text in self.values.items() if name not in idle}
        asked = typed(self._sampling, others, boxes)
        rest = {name: value for name, value in options.items() if name not in _WHO}
        if any(name in rest for name in _REUSE):
            asked = {name: value for name, value in asked.items() if name not in _REUSE}
        sampling, more = split_options({"sampling": asked.pop("sampling"), **rest})
        return voice, {**asked, **more, "sampling": sampling}

    def _play(self, voice: Voice, asked: dict[str, Any]) -> None:
        number = self._number + 1
        playing = Playing(self.engine, number, f"{self._name}.{number}", voice, self._record)
        try:
            if voice.is_mixture:
                self._desk.choose(voice.adapters)
                self._desk.begin(number, playing.request_id)
            prompt = [{"role": "user", "content": self.prompt}] if self.chat and self.prompt else self.prompt
            playing.begin(prompt, asked)
        except BaseException:
            self._desk.end()
            playing.close()
            raise
        self._number, self._playing = number, playing
        self.tell(playing.started())
        self._show_faders()
        sender = Sender(lambda: self._update(playing))
        playing.poke = sender.poke
        sender.poke()

    def _update(self, playing: Playing) -> bool:
        """Send what is new; on the sender's thread."""
        playing.catch_up()
        is_ended = playing.feed.is_ended
        try:
            with self._sending:
                self.tell(*playing.news())
        except Exception as error:
            self.say(f"the stream cannot be shown: {type(error).__name__}: {error}", is_error=True)
        if fault := playing.fault():
            self.say(fault, is_error=True)
        if is_ended:
            self._finish(playing)
        return not is_ended

    def _finish(self, playing: Playing) -> None:
        moves = [move.to_dict() for move in self._desk.moves if move.run == playing.number]
        with self._lock:
            fired = self._desk.end()
            self.completion, (self._trace, self._untraced) = playing.completion, playing.trace()
            if moves and self._trace is not None:
                self._trace = replace(self._trace, metadata={**self._trace.metadata, "faders": moves})
            playing.close()
            edited = "not edited: the faders were moved after the last token had been computed" if moves else ""
            if fired:
                edited = f"edited: the faders changed the scalings of {fired} tokens"
            playing.ended = playing.ending(edited=edited)
            playing.done.set()
        self.tell(playing.ended)
        self._choose()

    def _now(self) -> tuple[float, int]:
        """Return seconds since the running request's submission, and its generated tokens."""
        return self._playing.now() if self.is_running else (0.0, 0)

    def _require_faders(self) -> None:
        voice = self._playing.voice if self.is_running else None
        if voice is not None and not voice.is_mixture:
            raise UserError(f"faders move the adapters of a mixture; {voice.to_json()['label']} is answering")

    def _show_faders(self, page: str = "", seq: int = 0) -> None:
        moves = [{"token": move.token, "key": adapter_key(self._desk.adapters.index(move.adapter)), "value": move.value}
                 for move in self._desk.moves if self._playing is not None and move.run == self._playing.number
                 and move.adapter in self._desk.adapters]
        self.faders = {"mode": self._desk.mode, "values": self._desk.values, "ranges": RANGES, "moves": moves,
                       "page": page, "seq": seq}

    def _on_hello(self, content: dict[str, Any]) -> None:
        super()._on_hello(content)
        playing = self._playing
        if playing is None:
            return
        page = {"page": str(content.get("page"))}
        with self._sending:
            news, buffers = playing.news(is_whole=True)
            self.tell({**playing.started(), **page})
            self.tell({**news, **page}, buffers)
            if playing.ended is not None:
                self.tell({**playing.ended, **page})

    def _on_run(self, content: dict[str, Any]) -> None:
        self._take_typed(content, ("prompt", "voice", "values", "chat"))
        asked = self.voice
        self.refresh()
        # whoever was asked for is gone: nobody else answers unasked
        if self.voice == asked:
            self.run()

    def _on_stop(self, _: dict[str, Any]) -> None:
        self.stop()

    def _on_voices(self, _: dict[str, Any]) -> None:
        self.refresh()

    def _on_fader(self, content: dict[str, Any]) -> None:
        with self._lock:
            self._require_faders()
            index, value = content.get("adapter"), content.get("value")
            if not isinstance(index, int) or not 0 <= index < len(self._desk.adapters):
                raise UserError("this fader's mixture is not on the desk any more; reload the page")
            name = self._desk.adapters[index]
            if value is None:
                self._desk.clear(name, *self._now())
            else:
                self._desk.set(name, value, content.get("mode"), *self._now())
            self._show_faders(str(content.get("page")), content.get("seq") or 0)

    def _on_mode(self, content: dict[str, Any]) -> None:
        mode = content.get("mode")
        if mode not in RANGES:
            raise UserError(f"a fader's mode is 'bias' or 'force', not {mode!r}")
        with self._lock:
            self._desk.clear(None, *self._now())
            self._desk.mode = mode
            self._show_faders()

    def _on_clear(self, _: dict[str, Any]) -> None:
        self.clear_faders()


def console(
    engine: Engine, prompt: str = "", *, title: str = "Console", theme: str = "auto", chat: bool = False,
    record: str | Sequence[str] = ("scalings",), **defaults: Any,
) -> Console:
    """Return a console: prompt, streamed answer coloured by its leading adapter, scalings as they are computed, faders.

    Afterwards `console.completion`, `console.trace`, `console.history` (what was moved when), `console.explore()`,
    `console.show()` and `console.save(path)` have what ran.

    Args:
        engine: runs the requests; they share its batches with everybody else's.
        prompt: what the prompt box holds at first.
        title: the heading.
        theme: "auto" (the notebook's), "light" or "dark".
        chat: send the prompt as a user's message, through the base's chat template.
        record: what `engine.record` records of each run.
        **defaults: of `Engine.submit`: `mixture="demo"`, `max_tokens=200`, `temperature=0.7`, ...

    Raises:
        UserError: not an engine, or a closed one; an unknown setting, or one out of its range.
    """
    return Console(engine, prompt, title, theme, chat, record, defaults)
