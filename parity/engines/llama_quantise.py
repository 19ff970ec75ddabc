"""llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes
from pathlib import Path

from parity.errors import UsageError


def quantise_model(source: Path, target: Path, ftype: int, n_threads: int) -> None:
    """Write ``source`` quantised to ``target``.

    ``ftype`` is llama.cpp's ``llama_ftype`` (``gguf.LlamaFileType``).
    """
    from parity.engines import llama

    library = llama.library()
    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = ftype, n_threads
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if code != 0:
        raise UsageError(
            "llama.cpp could not quantise a model",
            where=str(source),
            why=f"it returned {code}",
            todo="see its messages above",
        )
