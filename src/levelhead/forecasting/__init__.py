"""The public estimator, its intervals, its backtest and its bench."""
