"""Talk to a model in a terminal, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.errors import PlanError, Problem, SurgeryError, counted
from scale_surgery.fields import KIND_NAMES, fields_of
from scale_surgery.running.expansion_names import expansion_problems
from scale_surgery.running.options import RunOptions
from scale_surgery.show.answers import AnswerScreen, choose_marking, render_opening
from scale_surgery.show.console import Output
from scale_surgery.show.layout import Facts, sentence
from scale_surgery.show.path_colours import Marking
from scale_surgery.talking.conversation import Conversation, EncodedPrompt
from scale_surgery.talking.generate import summarise
from scale_surgery.talking.interrupt import Interrupt, interruptible
from scale_surgery.talking.records import Answer, Generation, Look
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.talking.speaker import Speaker, has_template, loaded_speaker, open_subject

PROMPT, MORE = "> ", ". "
# each is a method of Session of the same name; the last one ends its loop
COMMANDS = {
    "/help": "list the commands",
    "/reset": "clear the conversation",
    "/again": "answer the last message again",
    "/paths": "show or hide the path of each token",
    "/set": "show the settings. /set temperature 0.7 changes one, /set temperature resets it",
    "/exit": "end the chat, like Ctrl-D",
}
KEYS = "Ctrl-C stops an answer, Ctrl-D or /exit ends, /help lists all commands"
SETTABLE = ("system", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "expansion")


@dataclass(frozen=True)
class Voice:
    """A participant that answers: the model, or its base; `name` is its name in the conversation."""

    name: str
    is_base: bool
    conversation: Conversation
    answers: list[Answer]


def chat(
    model: str | Path,
    out: Output,
    settings: GenerationSettings = GenerationSettings(),
    *,
    compare: bool = False,
    look: Look = Look(),
    run: RunOptions = RunOptions(),
    revision: str | None = None,
) -> Generation:
    """Chat with a model until the input ends; with `compare`, its base answers too, in its own conversation."""
    subject = open_subject(model, settings, compare=compare, run=run, revision=revision)
    with (
        loaded_speaker(subject, run, out.track) as speaker,
        speaker.isolated_random_state(settings.seed),
        interruptible() as interrupt,
    ):
        session = Session(speaker, out, settings, look, interrupt, compare=compare)
        session.open()
        for message in session.messages():
            session.take(message)
        answers, *base = [voice.answers for voice in reversed(session.voices)]
        return summarise(speaker, session.settings, answers, base[0] if base else [])


class Session:
    """A conversation in a terminal, with its settings."""

    def __init__(
        self,
        speaker: Speaker,
        out: Output,
        settings: GenerationSettings,
        look: Look,
        interrupt: Interrupt,
        *,
        compare: bool,
    ) -> None:
        self.speaker, self.out, self.settings, self.look, self.interrupt = speaker, out, settings, look, interrupt
        self.has_template = has_template(speaker.subject, settings)
        named = [("base", True), ("expanded", False)] if compare else [(speaker.subject.name, False)]
        self.voices = [Voice(name, is_base, self._conversation(is_base=is_base), []) for name, is_base in named]
        self.last: str | None = None

    def _conversation(self, *, is_base: bool) -> Conversation:
        return Conversation(self.speaker.subject, has_template=self.has_template, is_base=is_base)

    @property
    def marking(self) -> Marking:
        """The way in which the paths of tokens are shown."""
        return choose_marking(self.out.results, self.look) if self.speaker.routing else "nothing"

    def open(self) -> None:
        """Show the models and settings that answer."""
        reason = "--raw" if self.settings.raw else "no chat template"
        rows = [
            ("model", self.speaker.description),
            *([("base", str(self.speaker.base_name))] if len(self.voices) > 1 else []),
            ("messages", "by its chat template" if self.has_template else f"{reason}; the model continues your text"),
            ("answers", self.settings.describe(self.speaker.network.generation_config)),
            ("context", _count(self.speaker.subject.context)),
            ("keys", KEYS),
        ]
        self.out.say(render_opening(self.speaker.subject.name, rows, self.speaker.paths, self.marking))

    def messages(self) -> Iterator[str]:
        """Generate the typed messages until the input ends."""
        while True:
            try:
                message = self._ask()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.out.say("")
                self._note("Ctrl-D or /exit ends")
                continue
            if message.rstrip().partition(" ")[0] == "/exit":
                return
            yield message

    def _ask(self) -> str:
        """Read a message; a line that ends with a backslash continues on the next."""
        self.interrupt.times = 0
        try:
            self.interrupt.is_typing = True
            lines = [self.out.ask(PROMPT)]
            while lines[-1].endswith("\\"):
                lines[-1:] = [lines[-1][:-1], self.out.ask(MORE)]
        finally:
            self.interrupt.is_typing = False
        return "\n".join(lines)

    def take(self, message: str) -> None:
        """Run a command or answer a message; an error is shown, and the session goes on."""
        try:
            if message.startswith("/"):
                self._obey(*message.rstrip().partition(" ")[::2])
            elif message.strip() or (self.voices[-1].conversation.turns and not self.has_template):
                # a leading blank turns the text of a command into a message
                self._answer(message.removeprefix(" ") if message.startswith(" /") else message)
        except SurgeryError as error:
            self.out.fail(*error.lines)

    def _answer(self, message: str) -> None:
        turns = [voice.conversation.turns for voice in self.voices]
        encoded = [self._encode(voice, message) for voice in self.voices]
        self.last = message
        screen = AnswerScreen(self.out, self.marking, [voice.name for voice in self.voices], self.speaker.paths)
        try:
            answers = [self._speak(screen, place, message, read) for place, read in enumerate(encoded)]
        except SurgeryError:
            for voice, before in zip(self.voices, turns, strict=True):
                voice.conversation.return_to(before)
            raise
        finally:
            screen.end()
        for voice, answer in zip(self.voices, answers, strict=True):
            self._note_ending(voice, answer)
        self.out.say("")

    def _encode(self, voice: Voice, message: str) -> EncodedPrompt:
        encoded = voice.conversation.encode(message, self.settings)
        if encoded.left_out:
            turns = "the oldest turn is" if encoded.left_out == 1 else f"the {encoded.left_out} oldest turns are"
            context = _count(self.speaker.subject.context)
            self._note(f"{voice.name}: the context is {context}, so {turns} left out")
        return encoded

    def _speak(self, screen: AnswerScreen, place: int, message: str, encoded: EncodedPrompt) -> Answer:
        voice = self.voices[place]
        switched = self.speaker.as_base() if voice.is_base else self.speaker.as_chosen(self.settings)
        with switched, self.interrupt.speaking():
            answer = self.speaker.speak(
                message, encoded.ids, self.settings, lambda token: screen.add(token, place), self.interrupt
            )
        voice.conversation.add(answer)
        voice.answers.append(answer)
        return answer

    def _note_ending(self, voice: Voice, answer: Answer) -> None:
        reasons = {
            "length": f"stopped after {_count(len(answer.tokens))}, see /set max-new-tokens",
            "context": f"stopped: the context of {_count(self.speaker.subject.context)} is full",
            "interrupted": "stopped",
        }
        if answer.ended != "end":
            goes_on = "" if self.has_template else "; an empty line continues it"
            name = f"{voice.name}: " if len(self.voices) > 1 else ""
            self._note(name + reasons[answer.ended] + goes_on)

    def _note(self, text: str) -> None:
        self.out.say(sentence(text, "dim"))

    def _obey(self, name: str, rest: str) -> None:
        if name not in COMMANDS:
            raise PlanError(Problem("command-unknown", name, commands=list(COMMANDS)))
        getattr(self, f"_{name.removeprefix('/')}")(rest.strip())

    def _help(self, _: str) -> None:
        self.out.say(Facts("", [*COMMANDS.items(), ("...\\", "continue the message in the next line")]))

    def _reset(self, _: str) -> None:
        for voice in self.voices:
            voice.conversation.clear()
        self._note("the conversation is cleared")

    def _again(self, _: str) -> None:
        if self.last is None:
            raise PlanError(Problem("nothing-said", "/again"))
        known = [(voice.conversation.turns, voice.conversation.before) for voice in self.voices]
        for voice in self.voices:
            voice.conversation.take_back()
        try:
            self._answer(self.last)
        except SurgeryError:
            for voice, (turns, before) in zip(self.voices, known, strict=True):
                voice.conversation.turns, voice.conversation.before = turns, before
            raise

    def _paths(self, _: str) -> None:
        if self.speaker.routing is None:
            raise PlanError(Problem("paths-of-unrouted", "/paths", model=self.speaker.subject.name))
        self.look = replace(self.look, paths=self.marking == "nothing")
        self._note("paths are hidden" if self.marking == "nothing" else f"paths are shown by {self.marking}")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if name:
            self.settings = changed(
                self.settings, name, value.strip(), has_template=self.has_template, paths=self.speaker.choices
            )
        self._note(self.settings.describe(self.speaker.network.generation_config))


def changed(
    settings: GenerationSettings, name: str, text: str, *, has_template: bool, paths: Sequence[str] = ()
) -> GenerationSettings:
    """Change one setting to the typed value, or to its default without a value; `paths` are names of expansions."""
    known = {field.option: field for field in fields_of(GenerationSettings).values() if field.name in SETTABLE}
    if not has_template:
        del known["system"]
    if not paths:
        del known["expansion"]
    if (field := known.get(name)) is None:
        raise PlanError(Problem("chat-setting-unknown", f"/set {name}", names=list(known)))
    try:
        value = field.kind(text) if text else field.default
    except ValueError as error:
        raise PlanError(Problem("value-unfit", f"/set {name}", value=text, kind=KIND_NAMES[field.kind])) from error
    if (expected := field.expects(value)) is not None:
        raise PlanError(Problem("value-unfit", f"/set {name}", value=value, kind=expected))
    new = replace(settings, **{field.name: value})
    if problems := [*expansion_problems(new.expansion, paths, "this model")]:
        raise PlanError(*problems)
    return new


def _count(tokens: int | None) -> str:
    return "unknown" if tokens is None else counted(tokens, "token")
