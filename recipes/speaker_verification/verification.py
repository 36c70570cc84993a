"""Speaker verification: the error rates of embeddings on a list of trials.

scikit-learn is imported in the function that needs it, since that takes as long as importing torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from unitrain import NonFiniteError, Strategy
from unitrain.recipes.speaker_verification.model import SpeakerNet
from unitrain.recipes.speaker_verification.speech import Trials

P_TARGET, C_MISS, C_FALSE_ALARM = 0.05, 1.0, 1.0  # of minDCF, as in voxceleb_trainer


class ErrorRates(NamedTuple):
    """Error rates of a verification."""

    eer: float
    """Equal error rate: where as many impostors are accepted as speakers are rejected."""
    min_dcf: float
    """Minimum of the detection cost of the NIST speaker recognition evaluations; 1 is a system that knows nothing."""


def verify(strategy: Strategy, model: nn.Module, loader: Any, trials: Trials) -> ErrorRates:
    """Return the error rates of a model, the same on all ranks. Collective.

    Each utterance's embedding is computed once, by one rank. The score of a trial is the mean cosine between the crops
    of one utterance and those of the other.

    Args:
        strategy: the strategy of this run.
        model: a prepared ``SpeakerNet``.
        loader: a loader of ``TrialCrops`` of the trials' files.
        trials: the trials.
    """
    dimensions = cast(SpeakerNet, strategy.unwrap(model)).dimensions
    means = [torch.empty(0, dimensions, dtype=torch.float64, device=strategy.device)]  # a rank may have none
    with strategy.evaluation(model), strategy.autocast():
        for crops in loader:
            each = torch.stack([F.normalize(model(crop).double()) for crop in crops.unbind(1)])
            means.append(each.mean(0))  # the dot product of two means is the mean of all dot products
    embeddings = strategy.gather(torch.cat(means), in_order=loader).cpu().numpy()
    scores = (embeddings[trials.first] * embeddings[trials.second]).sum(1)
    return ErrorRates(*strategy.on_main(lambda: tuple(error_rates(scores, trials.same))))


def error_rates(scores: NDArray[np.floating[Any]], same: NDArray[np.bool_]) -> ErrorRates:
    """Return the error rates of scores of trials, of which ``same`` tells whether the speaker is the same.

    Raises:
        NonFiniteError: a score is not a number.
    """
    from sklearn.metrics import roc_curve

    if not np.isfinite(scores).all():
        raise NonFiniteError("the score of a trial is not finite: the network's embeddings of its utterances are not.")
    false_alarms, hits, _ = roc_curve(same, scores, drop_intermediate=False)
    misses = 1 - hits
    # Between two thresholds, both rates are interpolated.
    eer = np.interp(0, false_alarms - misses, false_alarms)
    cost = C_MISS * P_TARGET * misses + C_FALSE_ALARM * (1 - P_TARGET) * false_alarms
    return ErrorRates(float(eer), float(cost.min() / min(C_MISS * P_TARGET, C_FALSE_ALARM * (1 - P_TARGET))))
