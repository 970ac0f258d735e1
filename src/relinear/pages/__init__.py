"""Build self-contained HTML reports from blocks of text, tables and figures, with one template."""
