"""Test suites that other projects wrote, run on models with operators: ``make outside``."""
