"""Channel attention, reversible normalisation, the closed-form line, σReparam."""
