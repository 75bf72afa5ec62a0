"""The public door of glm5-plugins."""
