"""Teachers, one a file: MODEL (what is written into provenance) and conversations(persona, category, n, seed).

`conversations` yields dicts of messages, tools (where offered) and thinking.
"""
