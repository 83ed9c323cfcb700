"""Pools whose environments are one program, in Rust or another language: ``rust:PATH``.

The program steps all environments of a pool in its own threads and exchanges one message a step.
docs/game_protocol.md describes the messages; clients/rust has the Rust side.
"""
