"""Slow twin of SAMformer: RevIN and eqs. (3)-(4) of Ilbert et al. 2024, window by window.

`parameters` are the network's by name; torch is used for its automatic differentiation alone.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def statistics(window: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and sqrt(var + eps) of each row of `window [D, L]`, `[D, 1]`."""
    mean = window.sum(dim=1, keepdim=True) / window.shape[1]
    variance = (window - mean).pow(2).sum(dim=1, keepdim=True) / window.shape[1]
    return mean, (variance + eps) ** 0.5


def attention(z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """A `[D, D]`: A_ij = exp(q_i·k_j/√m) / Σ_j' exp(q_i·k_j'/√m), row by row."""
    queries = z @ parameters["query"] + parameters.get("query_bias", 0.0)
    tied = "key" not in parameters
    keys = queries if tied else z @ parameters["key"] + parameters.get("key_bias", 0.0)
    rows = []
    for query in queries:
        logits = torch.stack([torch.dot(query, key) for key in keys]) / len(query) ** 0.5
        weights = torch.exp(logits - logits.max())
        rows.append(weights / weights.sum())
    return torch.stack(rows)


def core(z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """[Z + A(Z) Z W_V W_O] W with biases where there are any; without W_O the value is W_V."""
    values = z @ parameters["value"] + parameters.get("value_bias", 0.0)
    written = attention(z, parameters) @ values
    if "output" in parameters:
        written = written @ parameters["output"] + parameters.get("output_bias", 0.0)
    return (z + written) @ parameters["head"] + parameters.get("head_bias", 0.0)


def normalised(window: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
    """RevIN: (x - mean)/s, then γ and β of each channel if there are any."""
    mean, deviation = statistics(window, eps)
    z = (window - mean) / deviation
    if "norm.gain" in parameters:
        z = z * parameters["norm.gain"][:, None] + parameters["norm.shift"][:, None]
    return z


def forecast(
    windows: Tensor, parameters: dict[str, Tensor], *, revin: bool = True, eps: float = 1e-5
) -> Tensor:
    """`[B, D, L]` → `[B, D, H]`, each window by itself; RevIN's inverse undoes β, γ, s, mean."""
    made = []
    for window in windows:
        if not revin:
            made.append(core(window, parameters))
            continue
        y = core(normalised(window, parameters, eps), parameters)
        if "norm.gain" in parameters:
            y = (y - parameters["norm.shift"][:, None]) / parameters["norm.gain"][:, None]
        mean, deviation = statistics(window, eps)
        made.append(y * deviation + mean)
    return torch.stack(made)
