"""What a run knows about its data before the first step."""

import numpy as np
import torch

from mmldlm.model.weights import whitening_of
from tests.runs import make_trainer


def test_a_whitened_start_is_found_from_the_normalised_training_latents(store, tmp_path):
    plain, white = (
        make_trainer(tmp_path / str(on), store, f"model.whiten_init={on}").setup for on in (False, True)
    )
    split = plain.train_split
    latents = plain.store.normalizer.normalize(split.read(np.arange(len(split))).latents)
    matrix = torch.from_numpy(whitening_of(latents.reshape(-1, latents.shape[-1])))
    expected = (plain.denoiser.latent_embed.weight.double() @ matrix).float()
    assert torch.equal(white.denoiser.latent_embed.weight, expected)
    assert not torch.allclose(white.denoiser.latent_embed.weight, plain.denoiser.latent_embed.weight)
