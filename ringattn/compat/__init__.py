"""Other systems' names for ring attention, so that a program changes an import: `ring_flash_attn`, `context_parallel`.

Each is a thin shim over `ringattn.ring_attention`. Nothing here is imported by `import ringattn`. See docs/migration.md.
"""
