"""Audit a checkpoint before it is served: python examples/audit_checkpoint.py MODEL_DIR [BF16_DIR]"""

import sys

import annie_quant as aq

audit = aq.checkpoint.audit(sys.argv[1], source=sys.argv[2] if len(sys.argv) > 2 else None)
for title, value in audit.to_dict()["summary"].items():
    print(f"{title}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
for finding in audit.findings:
    print(f"✗ {finding.code} {finding.tensor}: {finding.message}")
compared = [t for t in audit.tensors if t.rel_l2 is not None]
for t in sorted(compared, key=lambda t: -t.rel_l2)[:3]:
    print(f"  {t.name}: relative error {t.rel_l2:.4f} against bf16")
sys.exit(0 if audit.ok else 1)
