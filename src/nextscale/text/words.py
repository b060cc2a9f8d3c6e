"""The embedded model's text encoder: a closed vocabulary of phrases and a small transformer over them."""

from __future__ import annotations

import difflib
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.errors import NextscaleError
from nextscale.io.config import MAX_BLOCKS, Config, Limits
from nextscale.io.reading import read_json

logger = logging.getLogger(__name__)

END_TOKEN = 0  # closes every prompt, so that none is empty
WORD = re.compile(r"(?:[an]m*)+(?:'(?:am*)+)?|(?:om*)+|s[sm]*")  # over the kinds of characters, see `_kind`
LETTERS = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Nd"))
JOINERS = frozenset("\u200c\u200d" + "".join(map(chr, range(0xE0020, 0xE0080))))  # inside words and flags
REPLACED_CHARACTERS = str.maketrans({"-": " ", "\u200b": " ", "’": "'", "＇": "'"})
MAX_NAMED, MAX_SHOWN = 20, 40  # unknown words in one sentence, and characters of each
ENTRY_KINDS = (
    *("objects", "shapes", "letters", "colours", "materials", "styles", "sizes", "counts", "relations", "backgrounds"),
    "filler",
)
OPTIONAL_KINDS = ("letters", "materials", "sizes")  # what the first models did not know


@dataclass(frozen=True)
class Entry:
    """One token: a name and other ways to say the same."""

    token: int
    kind: str
    name: str
    also: tuple[str, ...]

    @property
    def phrases(self) -> tuple[str, ...]:
        return (self.name, *self.also)


class Lexicon:
    """A map of phrases to tokens, the longest first: "teddy bear" is one thing, and "to the left of" one relation."""

    def __init__(self, content: dict[str, Any]) -> None:
        """`content` has a list of {"name", "also"} per kind; filler words are read and mean nothing."""
        self.entries: list[Entry] = []
        self.phrases: dict[tuple[str, ...], Entry] = {}
        for kind in ENTRY_KINDS:
            for item in content.get(kind, ()) if kind in OPTIONAL_KINDS else content[kind]:
                also = tuple(item.get("also", ()))
                entry = Entry(-1 if kind == "filler" else len(self.entries) + 1, kind, item["name"], also)
                if kind != "filler":
                    self.entries.append(entry)
                for phrase in entry.phrases:
                    key = tuple(split(phrase))
                    if self.phrases.setdefault(key, entry) is not entry:
                        raise NextscaleError(f"the vocabulary has {phrase!r} twice")
        self.longest = max(map(len, self.phrases))
        self.words = sorted({word for phrase in self.phrases for word in phrase})

    @classmethod
    def read(cls, path: Path) -> Lexicon:
        content = read_json(path, "a vocabulary")
        try:
            return cls(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NextscaleError(f"{path} is not a vocabulary: {error}") from None

    def __len__(self) -> int:
        """The number of tokens, the closing one included."""
        return len(self.entries) + 1

    def of_kind(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def parse(self, prompt: str) -> tuple[list[int], list[str]]:
        """Tokens of a prompt (the closing one included) and the words that it does not know."""
        words = split(prompt)
        tokens: list[int] = []
        unknown: list[str] = []
        start = 0
        while start < len(words):
            for length in range(min(self.longest, len(words) - start), 0, -1):
                entry = self.find(words[start : start + length])
                if entry is not None:
                    if entry.kind != "filler":
                        tokens.append(entry.token)
                    start += length
                    break
            else:
                unknown.append(words[start])
                start += 1
        return [*tokens, END_TOKEN], unknown

    def find(self, words: Sequence[str]) -> Entry | None:
        *before, last = words
        stems = [last, *(last[: -len(end)] for end in ("s", "es") if last.endswith(end) and len(last) > 3)]
        return next((self.phrases[key] for stem in stems if (key := (*before, stem)) in self.phrases), None)

    def near(self, word: str) -> list[str]:
        """Known words that are spelled alike."""
        return difflib.get_close_matches(word, self.words, n=3, cutoff=0.6)

    def explain(self, unknown: Sequence[str]) -> str:
        """Unknown words in a sentence: "'foks' (perhaps fox), 'qwerty'"."""
        parts, distinct = [], list(dict.fromkeys(unknown))
        for word in distinct[:MAX_NAMED]:
            near = self.near(word) if len(word) <= MAX_SHOWN else []
            shown = repr(word if len(word) <= MAX_SHOWN else f"{word[:MAX_SHOWN]}…")
            parts.append(shown + (f" (perhaps {' or '.join(near)})" if near else ""))
        more = len(distinct) - MAX_NAMED
        return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def split(text: str) -> list[str]:
    """The words of any script. A run of letters without case (猫) or of emoji (🦊) is one, too: better named as
    unknown than passed over. Punctuation is none."""
    text = _plain(text)
    return [text[found.start() : found.end()] for found in WORD.finditer("".join(map(_kind, text)))]


def _plain(text: str) -> str:
    """Normalize to lowercase letters, each written in one way: ｆｏｘ and 𝐟𝐨𝐱 are fox. Fractions and the like stay
    what they are, or ½ would be two counts."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(unicodedata.normalize("NFKC", c) if unicodedata.category(c) in LETTERS else c for c in text)
    text = unicodedata.normalize("NFC", text.lower()).translate(REPLACED_CHARACTERS)
    return "".join(c for c in text if unicodedata.category(c) != "Cf" or c in JOINERS)


def _kind(c: str) -> str:
    """A character as a letter for `WORD`: letter, number, other letter, mark, symbol, or nothing of these."""
    if c.isascii():
        return "'" if c == "'" else "a" if c.isalpha() else "n" if c.isdigit() else " "
    category = unicodedata.category(c)
    if category[0] == "M" or c in JOINERS or "\U0001f3fb" <= c <= "\U0001f3ff":  # the colours of skin
        return "m"
    if category in ("So", "Co", "Cn", "Cs"):  # Cn: an emoji that is newer than this Python
        return "s"
    return "o" if category == "Lo" else {"L": "a", "N": "n"}.get(category[0], " ")


@dataclass(frozen=True)
class WordsConfig(Config):
    limits: ClassVar[Limits] = {"depth": (1, MAX_BLOCKS)}

    tokens: int
    width: int = 256
    depth: int = 3
    heads: int = 4
    length: int = 48  # the longest prompt, in tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_division("width", "heads")


class WordLayer(nn.Module):
    def __init__(self, config: WordsConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class WordTransformer(nn.Module):
    """A transformer that reads a whole prompt at once, so that "red" finds the shape it belongs to."""

    def __init__(self, config: WordsConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.tokens, config.width)
        self.position = nn.Parameter(torch.zeros(config.length, config.width))
        self.layers = nn.ModuleList(WordLayer(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    @staticmethod
    def computes_in_dtype(name: str) -> bool:
        return False  # a prompt costs nothing beside an image, so it is read in float32

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens [R, T], of which the first `lengths` [R] count -> features [R, T, width]."""
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])[:, None, None]
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class WordEncoder:
    """A `TextEncoder` that warns of the words that it does not know."""

    def __init__(self, lexicon: Lexicon, transformer: WordTransformer) -> None:
        self.lexicon, self.transformer = lexicon, transformer

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.transformer.parameters())

    def to(self, device: torch.device | str) -> None:
        self.transformer.to(device)

    def check(self, prompt: str) -> None:
        self._parse(prompt)

    def _parse(self, prompt: str) -> tuple[list[int], list[str]]:
        tokens, unknown = self.lexicon.parse(prompt)
        if len(tokens) == 1:
            nothing = "only filler words" if split(prompt) else "no words"
            what = self.lexicon.explain(unknown[:5]) if unknown else nothing
            raise NextscaleError(
                f"the prompt names nothing that this model can draw: {what}; `nextscale words` lists what it knows"
            )
        return tokens, unknown

    def warnings(self, prompt: str) -> list[str]:
        """Sentences about what of a prompt the model will not read."""
        tokens, unknown = self.lexicon.parse(prompt)
        limit, found = self.transformer.config.length, list[str]()
        if unknown:
            found.append(f"left out, because the model does not know them: {self.lexicon.explain(unknown)}")
        if len(tokens) > limit:
            found.append(f"a prompt of {len(tokens) - 1} known words is cut to the first {limit - 1}")
        return found

    def read(self, prompt: str) -> list[int]:
        tokens, _ = self._parse(prompt)
        for warning in self.warnings(prompt):
            logger.warning(warning)
        limit = self.transformer.config.length
        return tokens if len(tokens) <= limit else [*tokens[: limit - 1], END_TOKEN]

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        return [self.encode_one(prompt) for prompt in prompts]  # never padded, so that company changes nothing

    def encode_one(self, prompt: str) -> Tensor:
        tokens = torch.tensor([self.read(prompt)], device=self.transformer.position.device)
        lengths = torch.tensor([tokens.shape[1]], device=tokens.device)
        return self.transformer(tokens, lengths)[0]
