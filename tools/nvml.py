"""SM clock and energy of a GPU, from the driver's own management library."""

from __future__ import annotations

import ctypes
from typing import Any

_SM_CLOCK = 1  # NVML_CLOCK_SM


class Sensors:
    """The sensors of the GPU with a UUID ("GPU-..."). Every reading is None where ``missing`` says
    why there are none."""

    def __init__(self, uuid: str, library: str = "libnvidia-ml.so.1") -> None:
        self.missing = ""
        self._handle = ctypes.c_void_p()
        try:
            self._library = ctypes.CDLL(library)
            self._ask("nvmlInit_v2")
            self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        except (OSError, AttributeError) as error:
            self.missing = f"{library}: {error}"

    def sm_mhz(self) -> float | None:
        """The SM clock now."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM_CLOCK)

    def joules(self) -> float | None:
        """Energy since the driver was loaded: the difference over a time is the mean power."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return None if millijoules is None else millijoules / 1e3

    def _read(self, function: str, value: Any, *which: int) -> float | None:
        if self.missing:
            return None
        try:
            self._ask(function, self._handle, *which, ctypes.byref(value))
        except (OSError, AttributeError):
            return None
        return float(value.value)

    def _ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise OSError(f"{function} returned {code}")
