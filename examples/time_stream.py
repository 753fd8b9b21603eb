"""Time one server, token by token: python examples/time_stream.py URL [MODEL]"""

import sys

import annie_quant as aq

url = sys.argv[1]
model = sys.argv[2] if len(sys.argv) > 2 else None
questions = ["Hello!", "What is the capital of Japan?", "How was your day?"]
messages = [[{"role": "user", "content": q}] for q in questions]
requests = [aq.stream.chat(url, model, m, tag=m[0]["content"], max_tokens=64) for m in messages]

timings = aq.stream.run(requests, concurrency=1, warmup=requests[:1])
for r in timings.records():
    if r["error"]:
        print(f"{r['tag']!r}: {r['error']}")
        continue
    gaps = sorted(r["itl_ms"])
    median = f"{gaps[len(gaps) // 2]:.2f}" if gaps else "—"
    print(
        f"{r['tag']!r}: first word {r['first_content_ms']:.1f} ms, between pieces {median} ms, all {r['e2e_ms']:.1f} ms"
    )
# Raw frames with timestamps: aq.stream.Timings.load("timings") decodes them again.
timings.save("timings")
sys.exit(any(r["error"] for r in timings.records()))
