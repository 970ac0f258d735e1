"""The study of the Contextually Guided Transformer: its tasks, measures, figures and speeds."""
