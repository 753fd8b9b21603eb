"""The report's pages: HTML, Markdown, the comparison, trends over several runs."""
