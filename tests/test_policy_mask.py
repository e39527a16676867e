from __future__ import annotations

from array import array

import pytest

from lifecycle import Policy, RolloutRequest, RolloutState, Snapshot, VersionSpan


def sample(*spans: tuple[str, int, int], tokens: int = 4) -> Snapshot:
    """Four tokens of these versions."""
    return Snapshot(
        request=RolloutRequest(prompt_ids=[1], max_new_tokens=tokens),
        state=RolloutState.COMPLETED,
        tokens=array("i", range(tokens)),
        logprobs=array("d", [-1.0] * tokens),
        spans=tuple(VersionSpan(*span) for span in spans),
    )


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ([("3", 0, 4)], [1, 1, 1, 1]),
        ([("3", 0, 2), ("4", 2, 4)], [0, 0, 1, 1]),
        ([("3", 0, 1), ("4", 1, 2), ("3", 2, 4)], [1, 0, 1, 1]),
        ([("4", 2, 4)], [0, 0, 1, 1]),
        ([("3", 0, 2)], [1, 1, 1, 1]),
        ([], [1, 1, 1, 1]),
    ],
    ids=["one version", "resumed", "back again", "unknown prefix", "unknown end", "nothing known"],
)
def test_only_tokens_older_than_their_own_samples_newest_are_masked(
    spans: list[tuple[str, int, int]], mask: list[int]
) -> None:
    """A finished sample is never masked as a whole, however old its weights are by the time it is delivered."""
    assert Policy(mask_off_policy=True).loss_mask(sample(*spans)) == mask
    assert Policy().loss_mask(sample(*spans)) == [1, 1, 1, 1]


def test_a_sample_without_tokens_has_an_empty_mask() -> None:
    """Nothing to train on, nothing to mask."""
    assert Policy(mask_off_policy=True).loss_mask(sample(tokens=0)) == []
