"""Finds NVIDIA's libraries where pip has installed them: the loader does not search the folders of
wheels.

`pip install 'backtape[cuda]'` installs the compiler of kernels (NVRTC) and the library of matrix
products (cuBLAS); the driver comes with the machine. A library that is loaded here by its path is
afterwards found by its name in this process.
"""

import ctypes
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

# Each after those that it needs. The libraries of a CUDA toolkit are found without this.
LIBRARIES = {
    "nvrtc": ("libnvrtc-builtins.so", "libnvrtc.so"),
    "cublas": ("libcublasLt.so", "libcublas.so"),
}


def preload(wanted: Iterable[str] = tuple(LIBRARIES)) -> list[str]:
    """Loads those of the wanted libraries that wheels hold, and returns their paths. One that does not
    load is passed over: whoever needs it says which library is missing and what to do."""
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
