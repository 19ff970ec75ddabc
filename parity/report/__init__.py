"""Reports of a gate run: JSON, JUnit, Markdown, annotations, and one HTML file with pictures."""
