from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

__version__: str

class Tensor:
    @property
    def shape(self) -> tuple[int, int]: ...
    def tolist(self) -> list[list[float]]: ...
    def __len__(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Model:
    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        device: str = "cpu",
        threads: int | None = None,
        tensor_parallel: int = 1,
        format: str | None = None,
        dtype: str | None = None,
        context: int | None = None,
    ) -> None: ...
    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
    ) -> str: ...
    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
    ) -> Iterator[str]: ...
    def chat(self, messages: Iterable[Mapping[str, Any]], **sampling: Any) -> str: ...
    def chat_stream(self, messages: Iterable[Mapping[str, Any]], **sampling: Any) -> Iterator[str]: ...
    def tokenize(self, text: str, *, special: bool = True) -> list[int]: ...
    def detokenize(self, tokens: Iterable[int]) -> str: ...
    def score(self, text: str) -> list[tuple[int, float]]: ...

class Embedder:
    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        device: str = "cpu",
        threads: int | None = None,
        format: str | None = None,
        dtype: str | None = None,
        normalize: bool | None = None,
    ) -> None: ...
    def embed(self, texts: Iterable[str]) -> Tensor: ...

def pull(model: str, *, revision: str | None = None, include: Sequence[str] = ()) -> str: ...
def plan_fit(
    model: str | PathLike[str],
    *,
    device: str = "H100-SXM",
    context: int | None = None,
    weights: str = "bf16",
    cache_bits: int = 16,
    tp: int = 1,
) -> dict[str, Any]: ...
