"""What every other package builds on: errors, files, progress, resuming, the machine, untrusted text and secrets."""
