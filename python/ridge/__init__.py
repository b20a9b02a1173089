"""Language models: load, generate, stream, chat, embed, score and plan.

>>> import ridge
>>> ridge.Model().generate("Once upon a time", max_tokens=12, temperature=0)
', there was a little girl named Lily. She'
"""

import json as _json

from . import _ridge
from ._ridge import Tensor

__all__ = ["Embedder", "Model", "Tensor", "plan_fit", "pull"]
__version__ = "0.1.0"


def _sampling(temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed):
    return (temperature, top_k, top_p, min_p), (repetition_penalty, frequency_penalty, presence_penalty), seed


class Model:
    """A model that generates text, on one device.

    ``model`` is a folder in the Hugging Face layout, a GGUF file, or the ``ORG/NAME`` of a model that ``pull`` downloaded;
    the small embedded model if None. ``device`` is ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. ``format`` stores matrices in a
    format such as ``"q8_0"``, converted while loading; ``dtype`` is that of activations. ``context`` is the maximum number
    of tokens of a sequence.

    Methods release the global interpreter lock. Calls from several threads run one after the other.
    """

    def __init__(self, model=None, *, device="cpu", threads=None, tensor_parallel=1, format=None, dtype=None, context=None):
        path = None if model is None else str(model)
        self._model = _ridge.Model(path, device, threads, tensor_parallel, format, dtype, context)

    def generate(
        self, prompt, *, max_tokens=128, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05,
        repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, seed=None,
    ):
        """Returns the continuation of a text. ``temperature=0`` always takes the most likely token."""
        settings = _sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed
        )
        return self._model.generate(prompt, max_tokens, *settings)

    def stream(
        self, prompt, *, max_tokens=128, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05,
        repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, seed=None,
    ):
        """Returns an iterator over the pieces of the continuation. Dropping it ends the generation."""
        settings = _sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed
        )
        return self._model.stream(prompt, max_tokens, *settings)

    def chat(self, messages, **sampling):
        """Returns the answer to a list of messages, dicts with ``role`` and ``content``, by the model's chat template.

        Sampling is as for ``generate``.
        """
        return self.generate(list(messages), **sampling)

    def chat_stream(self, messages, **sampling):
        """Returns an iterator over the pieces of the answer to ``messages``."""
        return self.stream(list(messages), **sampling)

    def tokenize(self, text, *, special=True):
        """Returns the token ids of a text, with the begin and end tokens of the model if ``special``."""
        return self._model.tokenize(text, special)

    def detokenize(self, tokens):
        """Returns the text of token ids."""
        return self._model.detokenize(list(tokens))

    def score(self, text):
        """Returns for each token behind the first its id and the natural logarithm of its probability."""
        return self._model.score(text)


class Embedder:
    """A model that makes vectors of texts: an encoder such as BERT, or a decoder.

    Pooling and normalisation are those of the model's sentence-transformers files, else the mean; ``normalize`` overrides.
    Longer texts are cut to the model's maximum.
    """

    def __init__(self, model=None, *, device="cpu", threads=None, format=None, dtype=None, normalize=None):
        path = None if model is None else str(model)
        self._embedder = _ridge.TextEmbedder(path, device, threads, format, dtype, normalize)

    def embed(self, texts):
        """Returns a ``Tensor`` of f32 with a row for each text."""
        return self._embedder.embed(list(texts))


def pull(model, *, revision=None, include=()):
    """Downloads ``ORG/NAME`` from the Hugging Face Hub, or what of it is not in the cache, and returns its folder.

    ``include`` are patterns of file names in place of the files that Ridge reads. The environment variables of
    huggingface_hub apply: HF_TOKEN, HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE.
    """
    return _ridge.pull(model, revision, list(include))


def plan_fit(model, *, device="H100-SXM", context=None, weights="bf16", cache_bits=16, tp=1):
    """Returns whether a model fits a device and how many sequences of ``context`` tokens fit beside it, as a dict.

    ``fits`` and ``sequences`` are the answer, ``fit`` the memory ledger in bytes. ``weights`` is a format such as
    ``"bf16"``, ``"fp8"`` or ``"q4_k"``; ``tp`` the number of devices that layers are cut over.
    """
    return _json.loads(_ridge.plan_fit(str(model), device, context, weights, cache_bits, tp))
