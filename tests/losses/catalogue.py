"""All losses of the table."""

from __future__ import annotations

from .below import BELOW
from .coupled import COUPLED
from .functional import FUNCTIONAL
from .hidden import HIDDEN
from .masked import MASKED
from .opaque import OPAQUE
from .rowwise import ROWWISE
from .table import Loss
from .terms import TERMS

CATALOGUE: list[Loss] = [*FUNCTIONAL, *MASKED, *ROWWISE, *TERMS, *BELOW, *COUPLED, *HIDDEN, *OPAQUE]
