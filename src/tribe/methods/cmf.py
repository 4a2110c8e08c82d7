"""Filter the parameters as a Kalman filter would, and keep the learner near the result: CMF (ICLR 2024).

ROID ties its parameters to the source's, which never change. CMF, continual momentum filtering, lets the tie move:
hidden parameters, a refined source, are what is to be found, and the learned parameters are noisy measurements of them.
Prediction, loss and step are ROID's, see `tribe.methods.roid`. Then, with the variance v of the hidden parameters:

    predict    hidden <- alpha hidden + (1 - alpha) source          v <- alpha^2 v + q
    update     hidden <- beta hidden + (1 - beta) learned           beta = r / (v + r), r = 1 - q;   v <- beta v
    ensemble   learned <- gamma learned + (1 - gamma) hidden
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core import optim
from tribe.core.bounds import NOT_NEGATIVE
from tribe.core.state import tree_map
from tribe.fields import NotNegative, Share
from tribe.methods import Affine, Backbone, Info, Key, register
from tribe.methods.roid import Roid

PARAMETERS = 38_400  # for so many learned numbers q holds as it is; for others in proportion


class CmfState(NamedTuple):
    """ROID's state, the hidden parameters and their variance."""

    affine: Affine  # (S, C)
    adam: optim.Adam  # with SGD its first moment is the velocity
    mean: Tensor  # (S, K) moving mean of the predictions, uniform at first
    hidden: Affine  # (S, C), the source's at first
    variance: Annotated[Tensor, NOT_NEGATIVE]  # (S,) v, 0 at first
    key: Key
    info: Info


@register("cmf")
@dataclass(frozen=True)
class Cmf(Roid):
    """CMF with ROID's loss and corrections.

    Published settings: the defaults. The rules are those of the authors' code in ROID's repository, which also sets the
    optimiser for CIFAR: beta is never below 0.89, and 1 from 0.9999 on; q is in proportion to the number of learned
    parameters; the ensemble is with the updated hidden parameters, not with the predicted ones.
    """

    alpha: Share = 0.99  # share of the hidden parameters that stays when the filter predicts; the rest: the source's
    gamma: Share = 0.99  # share of the learned parameters in the ensemble with the hidden ones
    q: NotNegative = 0.005  # variance that the hidden parameters gain in a step

    paper = "Lee & Chang, Continual momentum filtering on parameter space for online test-time adaptation, ICLR 2024"

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> CmfState:
        """Start at the source; every class is equally likely."""
        roid = super().init(net, streams, seed)
        hidden, variance = net.source(streams)[0], torch.zeros_like(roid.mean[:, 0])
        return CmfState(roid.affine, roid.adam, roid.mean, hidden, variance, roid.key, roid.info)

    def ensemble(self, net: Backbone, state: CmfState) -> CmfState:
        """Return one step of the filter."""
        scales_and_shifts = ((slot, getattr(slot.layer, name)) for slot in net.slots for name in Affine._fields)
        learned = sum(slot.channels for slot, parameter in scales_and_shifts if parameter is not None)
        q = min(self.q * learned / PARAMETERS, 1.0)
        variance = self.alpha**2 * state.variance + q
        beta = ((1 - q) / (variance + (1 - q)).clamp_min(torch.finfo(variance.dtype).tiny)).clamp_min(0.89)
        beta = torch.where(beta < 0.9999, beta, 1)
        b = beta.unsqueeze(1)

        def updated(hidden: Tensor, source: Tensor, learned: Tensor) -> Tensor:
            return b * (self.alpha * hidden + (1 - self.alpha) * source) + (1 - b) * learned

        hidden = tree_map(updated, state.hidden, net.source()[0], state.affine)
        affine = tree_map(lambda p, h: self.gamma * p + (1 - self.gamma) * h, state.affine, hidden)
        return state._replace(affine=affine, hidden=hidden, variance=beta * variance)
