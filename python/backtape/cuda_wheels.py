"""NVIDIA's libraries where pip put them: a wheel's folder is on no search path of the loader.

`pip install 'backtape[cuda]'` brings the compiler of kernels (NVRTC) and the matrix products
(cuBLAS); the driver comes with the machine. What is loaded here by its path is found by its name
afterwards, by this process.
"""

import ctypes
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

# In the order in which they need each other. A CUDA toolkit's own libraries are found without this.
LIBRARIES = {
    "nvrtc": ("libnvrtc-builtins.so", "libnvrtc.so"),
    "cublas": ("libcublasLt.so", "libcublas.so"),
}


def preload(wanted: Iterable[str] = tuple(LIBRARIES)) -> list[str]:
    """Loads what wheels hold of these; the paths that were loaded. A library that does not load is left to
    whoever needs it: that says which one and what to do."""
    loaded = []
    for names in map(LIBRARIES.__getitem__, wanted):
        for path in (path for name in names for path in found(name)):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            loaded.append(str(path))
    return loaded


def found(name: str) -> list[Path]:
    """The files of a library in the wheels of this environment, newest version first."""
    paths = []
    for wheel in metadata.distributions():
        if not (wheel.metadata["Name"] or "").startswith("nvidia-"):
            continue
        for file in wheel.files or ():
            if file.name.startswith(f"{name}."):
                paths.append(Path(str(wheel.locate_file(file))))
    return sorted(paths, key=lambda path: path.name, reverse=True)
