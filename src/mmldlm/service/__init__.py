"""A trained model behind HTTP, and the page to try one: both call `Model` and nothing else of the house."""
