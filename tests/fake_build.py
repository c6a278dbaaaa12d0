"""A build function without the DSL: gcc makes an object whose entry adds up its arguments.

``FAKE_BUILD_LOG`` names a file that gets a line per compile; facts may ask for trouble.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace

_SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type; uint32_t pad; int64_t value; }} Any;
int {symbol}(void* self, const Any* args, int32_t n, Any* result) {{
  int64_t sum = {bias};
  for (int32_t i = 0; i < n; ++i) sum += args[i].value;
  result->type = 1; result->pad = 0; result->value = sum;
  return 0;
}}
"""


class FakeCompiled:
    def __init__(self, facts):
        self.facts = facts
        self.artifacts = SimpleNamespace(PTX="// no kernel\n", CUBIN=None)
        self.moe_launch = {"dynamic_shared_bytes": 1000 + facts["bias"]}

    def export_to_c(self, path, function_name):
        source = _SOURCE.format(symbol=f"__tvm_ffi_{function_name}", bias=self.facts["bias"])
        command = ["gcc", "-c", "-fPIC", "-x", "c", "-o", path, "-"]
        subprocess.run(command, input=source.encode(), check=True)


def compile_op(facts):
    with open(os.environ.get("FAKE_BUILD_LOG", os.devnull), "a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(facts.get("sleep", 0))
    trouble = facts.get("trouble")
    if trouble == "raise":
        raise ValueError("this tile does not fit")
    if trouble == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "print":
        os.write(1, b"a compiler's chatter\n")
    return FakeCompiled(facts)
