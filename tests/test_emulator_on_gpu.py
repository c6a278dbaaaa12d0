"""The emulator against a Hopper GPU: the same objects on the same inputs, every value compared."""

from __future__ import annotations

import golden_cases as golden
import pytest

pytestmark = pytest.mark.sm90

RUNGS = [
    pytest.param(name, config, id=golden.key_of(name, config))
    for name in golden.LAYERS
    for config in golden.rungs(name)
]


@pytest.mark.parametrize(("name", "config"), RUNGS)
def test_emulator_and_gpu_agree(name, config):
    gpu, emulated = (golden.record(name, config, where, stride=1) for where in ("cuda", "cpu"))
    golden.compare(name, emulated, gpu)
