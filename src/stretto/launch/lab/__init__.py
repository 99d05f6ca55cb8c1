"""A cluster in a box: hosts are network namespaces, links are shaped, one machine holds it all.

`plan` says what will exist and by which commands, `box` makes it so and takes it down again,
`leftovers` clears what killed labs left, `run` starts ranks inside and sums up what they sent.
"""
