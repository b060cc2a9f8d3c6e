"""Write the images of a benchmark as its official scorer reads them."""
