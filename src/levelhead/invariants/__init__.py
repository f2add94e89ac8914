"""Numbers of an attention layer's weights, and what each of them does and does not depend on."""
