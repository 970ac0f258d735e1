"""Plan, replace, checkpoint, fold: changing a model and bringing it back."""
