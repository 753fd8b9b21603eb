"""The report's charts, drawn as SVG."""
