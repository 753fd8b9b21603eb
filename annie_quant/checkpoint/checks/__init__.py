"""The checks of an audit, one module per subject. A check takes a QuantizedFolder and yields findings; none raises on a fault."""
