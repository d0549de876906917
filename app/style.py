"""How the page looks: theme, style sheet and the few keys it listens to. Nothing is fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

_ASSETS = Path(__file__).parent / "assets"

STYLE = (_ASSETS / "quorum.css").read_text(encoding="utf-8")
HEAD = f"<script>{(_ASSETS / 'quorum.js').read_text(encoding='utf-8')}</script>"


def theme() -> Any:
    """Quiet greys, one accent, and the fonts of the user's own system."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.stone,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        text_size=gr.themes.sizes.text_md,
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"),
    ).set(
        input_placeholder_color="#6b6560",
        input_placeholder_color_dark="#b8b2ac",
        body_background_fill="*neutral_50",
        body_background_fill_dark="#141210",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
    )
