"""Taking a run's metrics elsewhere: CSV, JSON lines, TensorBoard event files, wandb. Called by the CLI."""
