"""Inspection: residuals, the ops that a policy can name, and the log of `REMAT_LOG=residuals`."""

from remat._inspect._costs import OpCost as OpCost
from remat._inspect._costs import OpCosts as OpCosts
from remat._inspect._costs import list_ops as list_ops
from remat._inspect._print import print_saved_residuals as print_saved_residuals
from remat._inspect._residuals import Residual as Residual
from remat._inspect._residuals import saved_residuals as saved_residuals
