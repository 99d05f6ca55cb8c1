"""Codecs: what a message looks like on the wire when it is not the tensor itself.

Three ways to send less than a gradient's own type; `parse_wire` reads which one is wanted:

- a *cast* (bf16, fp16): the bucket is held, summed and sent in the type ``wire.dtype``;
- *per hop* (`Fp8`): encoded before every send and decoded after it, sums in fp32:
  ``courier.prepare(schedule, tensor, codec=wire.codec)``, then start it as any errand;
- *sparse* (``stretto.comm.codecs.sparse.SparseSum``): each rank's largest entries are gathered and
  summed by everybody, the rest stays for the next step.

Marks and other counts must not share a codec's tensor: beside a mark of 1, gradients of 1e-6 are
rounded to nothing. Lay the codec on the gradients' part of the bucket, send the marks plainly.
"""

from stretto.comm.codecs.codec import Codec, Laid
from stretto.comm.codecs.fp8 import Fp8
from stretto.comm.codecs.wire import Wire, parse_wire

__all__ = ["Codec", "Fp8", "Laid", "Wire", "parse_wire"]
