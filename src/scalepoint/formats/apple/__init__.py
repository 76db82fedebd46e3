"""The two file formats of Apple, over one stored graph: Core ML (.mlpackage) and Core AI (.aimodel)."""
