"""Config of the `data` group: text sources, mixtures, tokenizer, packing and data loading."""

import re
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache

from diffllm.core.bounds import check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.keys import class_declarations, key
from diffllm.core.registry import SOURCES
from diffllm.data.curriculum import MOST_WEIGHT, Between, Point, check_curriculum, check_sizes


class SampleBy(Enum):
    """Part of a plain-text file that becomes one document: whole file, paragraph or line."""

    document = "document"
    paragraph = "paragraph"
    line = "line"


class Packing(Enum):
    """How documents become training sequences.

    stream: all documents are concatenated, and the result is cut into sequences of equal length.
    best_fit: whole documents are combined into sequences; only documents longer than a sequence
    are cut.
    """

    stream = "stream"
    best_fit = "best_fit"


MIXTURE, TOKENS = "mixture", "tokens"
PREPARED_ELSEWHERE = (MIXTURE, TOKENS)
"""Sources without documents of text."""
BUILT_IN = ("stdlib", "packages", "synthetic", "files", "hub", TOKENS, MIXTURE)
"""Sources that refuse the keys of other sources; the source of a plugin can read every key."""
REQUIRED_KEYS = {
    "files": ("paths", "[file, directory, glob, ...]"),
    TOKENS: ("paths", "[file.bin, file.ds, ...]"),
    "hub": ("dataset", "<owner/name>"),
    MIXTURE: ("sources", "{name: {source: files, paths: [...], weight: 1}}"),
}
"""Required key of a source, with an example."""
NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass
class TextConfig:
    """One text source: local files, a Hugging Face dataset or a built-in corpus."""

    source: str = key(
        "stdlib",
        effect="order",
        fact="corpus",
        help="Kind of the corpus; set by data=.",
    )
    paths: list[str] = key(
        [],
        effect="order",
        read_by=("files", TOKENS),
        implies="files",
        kind=("path", "machine"),
        fact="corpus",
        resumable=True,
        help="Files, directories, globs: parquet, json, jsonl, text; json, jsonl, txt also .gz, "
        ".zst. Of a directory or glob, only the kind with the most bytes is read: parquet, json "
        "or text.",
    )
    text_column: str = key(
        "text",
        effect="order",
        read_by=("files", "hub"),
        fact="corpus",
        help="Column that holds the text, in parquet and json.",
    )
    prompt_column: str | None = key(
        None,
        effect="order",
        read_by=("files", "hub"),
        help="Column of the prompt before each text; prompts are context, without loss.",
    )
    sample_by: SampleBy = key(
        SampleBy.document,
        effect="order",
        read_by=("files",),
        fact="corpus",
        help="Unit of a text file that becomes one document.",
    )
    dataset: str | None = key(
        None,
        effect="order",
        read_by=("hub",),
        implies="hub",
        kind="path",
        fact="corpus",
        help="Hub dataset owner/name (data=hub).",
    )
    name: str | None = key(
        None,
        effect="order",
        read_by=("hub",),
        implies="hub",
        fact="corpus",
        help="Configuration of the hub dataset, if it has several.",
    )
    data_dir: str | None = key(
        None,
        effect="order",
        read_by=("hub",),
        implies="hub",
        fact="corpus",
        help="Folder of the hub dataset to read, if it has several.",
    )
    split: str = key(
        "train",
        effect="order",
        read_by=("hub",),
        fact="corpus",
        help="Split of the hub dataset, for training and held-out documents.",
    )
    revision: str | None = key(
        None,
        effect="order",
        read_by=("hub",),
        implies="hub",
        fact="corpus",
        help="Branch, tag or commit of the hub dataset; null: the newest commit at first use.",
    )

    def check_source(self, prefix: str) -> None:
        """Raise ConfigError for an unknown source, a missing key or a key that the source ignores.

        `prefix` is the prefix of the keys in messages, for example "data.sources.web.".
        """
        names = (*SOURCES, *PREPARED_ELSEWHERE)
        if self.source not in names:
            raise ConfigError(f"{prefix}source={self.source!r} is not one of {', '.join(names)}")
        if self.prompt_column == self.text_column:
            raise ConfigError(
                f"{prefix}prompt_column={self.prompt_column} must differ from {prefix}text_column"
            )
        sources_by_key = read_by() if self.source in BUILT_IN else {}
        usable_keys = [name for name, sources in sources_by_key.items() if self.source in sources]
        for name in sources_by_key:
            # The config of a source has no key `sources`.
            value = getattr(self, name, None)
            is_set = bool(value) and value != getattr(TextConfig, name, None)
            if is_set and name not in usable_keys:
                raise ConfigError(
                    f"{prefix}{name}={getattr(value, 'value', value)} cannot be set with "
                    f"{prefix}source={self.source}; keys of this source: "
                    f"{', '.join(usable_keys) or '(no keys)'}"
                )
        if self.source in REQUIRED_KEYS:
            name, example = REQUIRED_KEYS[self.source]
            if not getattr(self, name):
                raise ConfigError(f"{prefix}source={self.source} needs {prefix}{name}={example}")


@dataclass
class SourceConfig(TextConfig):
    weight: float = key(
        1.0,
        least=0,
        most=MOST_WEIGHT,
        effect="order",
        help="Share of the samples, relative to the sum of the weights of all sources.",
    )
    epochs_at_most: float | None = key(
        None,
        above=0,
        effect="order",
        help="Maximum passes over the training split; null: no limit. The weight of a source "
        "that reaches the limit goes to the other sources.",
    )


@dataclass
class DataConfig(TextConfig):
    """Training data: text source or mixture of sources, tokenizer, packing and data loading."""

    sources: dict[str, SourceConfig] = key(
        {},
        effect="order",
        read_by=(MIXTURE,),
        implies=MIXTURE,
        help="Sources of a mixture by name, each with the keys above, weight, epochs_at_most.",
    )
    curriculum: list[Point] = key(
        [],
        effect="order",
        help="Weights that change during the run: [{at: 0.8, weights: {code: 0.3, web: 0.7}}].",
    )
    between: Between = key(
        Between.constant,
        effect="order",
        help="Weights between two points of the curriculum.",
    )
    cache_dir: str = key(
        "${oc.env:DIFFLLM_CACHE,'~/.cache/diffllm'}",
        effect="none",
        kind=("path", "machine"),
        help="Directory of prepared corpora and tokenizers.",
    )
    tokenizer: str | None = key(
        None,
        effect="order",
        kind=("path", "machine"),
        fact="tokenizer",
        resumable=True,
        help="Path (.model, tokenizer.json or their directory) or owner/name; null: train one.",
    )
    eos_token: str | None = key(
        None,
        effect="order",
        fact="tokenizer",
        resumable=True,
        help="Token of data.tokenizer after each document; null: the EOS that its files name.",
    )
    vocab_size: int = key(
        "${model.vocab_size}",
        least=1,
        most=2**24,
        effect="order",
        fact="tokenizer",
        help="Number of pieces of a tokenizer that is trained here.",
    )
    tokenizer_sample_bytes: int = key(
        100_000_000,
        least=1,
        effect="order",
        fact="tokenizer",
        help="Bytes of text that a tokenizer is trained on, spread evenly over the corpus.",
    )
    heldout_fraction: float = key(
        0.02,
        above=0,
        below=1,
        effect="order",
        help="Share of documents to hold out; at least 20 and 50,000 tokens, at most a fifth.",
    )
    num_workers: int = key(
        1,
        least=0,
        most=256,
        effect="speed",
        kind="machine",
        help="Loader processes per rank; 0 reads in the training process.",
    )
    prefetch_factor: int = key(
        4,
        least=1,
        most=10_000,
        effect="speed",
        kind="machine",
        help="Micro-batches each loader process prepares ahead.",
    )
    packing: Packing = key(
        Packing.stream,
        effect="order",
        help="How documents become sequences: stream cuts anywhere, best_fit keeps them whole.",
    )
    mask_documents: bool = key(
        False,
        effect="numbers",
        help="Restrict attention to one document, and start positions at 0 in every document.",
    )
    visible_keys: float | None = key(
        None,
        least=1,
        effect="none",
        help="Mean number of keys that a query sees with mask_documents=true. `plan`, `count`, "
        "model.match_flops_to and the costs of a study compute FLOPs from this number; null: "
        "FLOPs of whole sequences. A run stores its measured number as `visible_keys` in "
        "summary.json.",
    )
    document_lengths: dict[int, int] = key(
        {},
        effect="none",
        help="Number of documents by length in tokens with EOS, for example {500: 90, 8000: "
        "10}. visible_keys follows from these lengths, seq_len and packing.",
    )
    sample_prompt: str | None = key(
        None,
        effect="none",
        kind="text",
        help="Text that the sample at the end of a run continues; null: the first held-out tokens.",
    )

    @property
    def whole_documents(self) -> bool:
        return self.packing is Packing.best_fit

    def for_source(self, source: SourceConfig) -> "DataConfig":
        text_settings = {item.name: getattr(source, item.name) for item in fields(TextConfig)}
        return replace(self, **text_settings, sources={}, curriculum=[])

    def validate(self) -> None:
        """Raise ConfigError for invalid values, without reading the corpus."""
        check_bounds("data.", self)
        self.check_source("data.")
        if self.source == MIXTURE:
            self.check_mixture()
        elif self.curriculum:
            raise ConfigError(
                "data.curriculum is only supported for a mixture; set data.sources={...}"
            )
        if self.eos_token is not None and self.tokenizer is None:
            raise ConfigError(
                f"data.eos_token={self.eos_token} needs data.tokenizer; a tokenizer that is "
                "trained here has the EOS </s>"
            )

    def check_current(self) -> None:
        """Raise ConfigError for a setting with which only an older version of diffllm can train."""

    def check_mixture(self) -> None:
        check_sizes(len(self.sources), len(self.curriculum))
        for name, source in self.sources.items():
            self.check_mixture_source(name, source)
        if not any(source.weight for source in self.sources.values()):
            raise ConfigError("data.sources: all weights are 0; at least one must be above 0")
        check_curriculum(self.curriculum, self.sources)

    def check_mixture_source(self, name: str, source: SourceConfig) -> None:
        prefix = f"data.sources.{name}."
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"data.sources: the name {name!r} may contain only letters, digits, _ and -"
            )
        if source.source == MIXTURE:
            raise ConfigError(
                f"{prefix}source=mixture: a mixture cannot contain a mixture; choose another source"
            )
        if source.source == TOKENS and self.tokenizer is None:
            raise ConfigError(
                f"{prefix}source=tokens needs data.tokenizer; "
                "set the tokenizer that encoded the tokens"
            )
        source.check_source(prefix)


@cache
def read_by() -> dict[str, tuple[str, ...]]:
    """Return {key: sources that read the key} for the keys that only some sources read."""
    declared = class_declarations(DataConfig).items()
    return {name: declaration.read_by for name, declaration in declared if declaration.read_by}
