"""Equal error rate and minimum detection cost, compared with other ways to compute them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from ranks import run_ranks
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_curve

import unitrain
from unitrain.errors import NonFiniteError
from unitrain.recipes.speaker_verification import model as speaker_model
from unitrain.recipes.speaker_verification import speech
from unitrain.recipes.speaker_verification import synthesis as speaker_synthesis
from unitrain.recipes.speaker_verification.verification import error_rates, verify


def scores_of(seed: int, trials: int = 500) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    draw = np.random.default_rng(seed)
    same = draw.random(trials) < 0.2
    scores: NDArray[np.float64] = draw.normal(0, 1, trials) + 1.5 * same
    return scores.round(2), same  # rounded: many are equal


@pytest.mark.parametrize("seed", range(5))
def test_the_equal_error_rate_is_where_the_roc_curve_meets_the_diagonal(seed: int) -> None:
    scores, same = scores_of(seed)
    false_alarms, hits, _ = roc_curve(same, scores)
    curve = interp1d(false_alarms, hits)
    expected = brentq(lambda x: 1 - x - curve(x), 0.0, 1.0)
    assert error_rates(scores, same).eer == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_detection_cost_is_the_least_of_all_thresholds(seed: int) -> None:
    scores, same = scores_of(seed)
    thresholds = [-np.inf, *scores, np.inf]
    costs = [0.05 * (scores[same] < t).mean() + 0.95 * (scores[~same] >= t).mean() for t in thresholds]
    assert error_rates(scores, same).min_dcf == pytest.approx(min(costs) / 0.05, rel=1e-12)


def test_scores_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="the score of a trial is not finite"):
        error_rates(np.array([0.0, np.nan]), np.array([True, False]))


def trials_in(folder: Path) -> speech.Trials:
    return speech.load(f"voxceleb:{folder}", Path(), Path("train_list.txt"), Path("test_list.txt")).trials


def rates(folder: Path, crops: int) -> tuple[float, ...]:
    trials = trials_in(folder)
    with unitrain.init(precision="fp64", device="cpu", timeout_s=60) as strategy:
        model = strategy.prepare(speaker_model.build("resnetse10"))
        loader = strategy.dataloader(speech.TrialCrops(trials.files, 0.2, crops), batch_size=2)
        return tuple(verify(strategy, model, loader, trials))


def test_rates_do_not_depend_on_the_ranks_even_if_one_has_no_utterance(tmp_path: Path) -> None:
    speaker_synthesis.make(tmp_path / "speech", train=(1, 1), test=(2, 2))
    (tmp_path / "speech" / "test_list.txt").write_text(
        "1 {0} {0}\n0 {0} {1}\n".format("id00001/video0/00000.wav", "id00002/video0/00000.wav")
    )
    alone = rates(tmp_path / "speech", 3)
    assert run_ranks(rates, tmp_path / "speech", 3, nprocs=3) == [alone] * 3


def test_a_score_is_the_mean_cosine_of_all_pairs_of_crops(tmp_path: Path) -> None:
    speaker_synthesis.make(tmp_path / "speech", train=(1, 1), test=(3, 2))
    trials = trials_in(tmp_path / "speech")
    model = speaker_model.build("resnetse10").double().eval()
    crops = speech.TrialCrops(trials.files, 0.2, 3)
    each = [model(crops[i][1].double()).detach().numpy() for i in range(len(crops))]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in each]
    scores = np.array([(unit[a] @ unit[b].T).mean() for a, b in zip(trials.first, trials.second, strict=True)])
    expected = error_rates(scores, trials.same)
    with unitrain.init(backend="single", precision="fp64", device="cpu") as strategy:
        loader = strategy.dataloader(crops, batch_size=4)
        found = verify(strategy, cast(speaker_model.SpeakerNet, strategy.prepare(model)), loader, trials)
    assert found == pytest.approx(expected, abs=1e-12)
