"""Set before any test module is imported: a transformers model imports triton, which reads its flag once."""

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from triton.runtime import interpreter

        # Without it an int32 overflow passes unnoticed: a block's offset in a large arena.
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)

# Tiny models run 20 to 50 times faster on one thread.
torch.set_num_threads(1)
