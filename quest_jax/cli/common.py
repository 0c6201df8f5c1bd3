"""What several commands share."""

from typing import Literal

Dtype = Literal["float32", "bfloat16"]
