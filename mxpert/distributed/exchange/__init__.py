"""Kernels of the SYMMETRIC transport: ranks store into each other's memory; flags order it.

Memory. Each rank has one region that all ranks can write, with the same sections at the same
offsets, and private words:

    rows, scales, ids, weights   received tokens; slot ``source · bound + t`` is token t of `source`
    partials                     slot ``owner · bound + t`` is what `owner` computed for own token t
    arrived [N, MAX_CTAS]        int64 flags of dispatch: [source, CTA]
    returned [N, MAX_CTAS]       int64 flags of combine: [owner, CTA]
    calls [N]                    int64, what each rank has called last
    words (private)              verdict, running calls, time-out and epoch; see `exchange_wait`
    destinations (private)       int64 bit mask of each own token: the ranks it was sent to

`bound` is the number of slots of a rank in this call. All ranks use the same bound, hence the same
number of CTAs and the same assignment of slots to CTAs (`schedule.py`).

Timeline of epoch e, the same kernels on every rank, in stream order:

    1. dispatch. Stores each token's row, ids and weights once to every rank that owns one of its
       experts, and ids −1 to the others and in slots without a token. Each CTA then sets
       ``arrived[rank, CTA] = e`` on every rank (release, system scope).
    2. sort. Each program waits until all N · CTAs flags of `arrived` are e (acquire, system
       scope), then agrees with the other programs on one verdict by a compare-and-swap:
       epoch e is complete, or a rank is lost. All programs must sort the same ids, although a rank
       that is late may still write its own. For callers with a sort of their own the last CTA of
       dispatch does step 2, once it has set its flags. They get a copy of the ids that nobody
       writes, in which all are −1 after a loss.
    3. GEMMs read the received rows.
    4. combine. Each CTA stores its share of the partial rows to the ranks that the tokens came
       from, sets ``returned[rank, CTA] = e`` there (release), waits for the same CTA of every rank
       (acquire), and sums the rows of its share in rank order.

Why one buffer of each kind suffices, without a barrier:

    * Dispatch e + 1 overwrites slots that a peer reads in steps 2 to 4 of epoch e. It starts when
      combine e of this rank has ended, which has seen the flag of every CTA of the peer's
      combine e, and each of these flags follows that CTA's reads and all earlier kernels.
    * Combine e + 1 overwrites partial rows that a peer sums in step 4 of epoch e. It starts behind
      step 2, which has seen the peer's flags of dispatch e + 1, and these follow the peer's
      combine e.
    * It holds because every rank flags every rank in both steps, even with no tokens, and because
      the kernels of one object are ordered by one stream. words[RUNNING] detects a second stream.
    * Flags and the epoch only grow, so a flag of another bound or an older epoch never counts.

Calls that differ. The low bits of an epoch, and of its flags, are a tag of the call: `max_tokens`,
the op and its options. A flag of this epoch with another tag ends a wait at once, whatever CTAs the
other rank has; every rank sees one, and `calls` says in full what the ranks have called.

Lost ranks. A wait ends after the time-out; `words[DECIDED]` then names the rank, for good. From
then on no wait of this rank polls, its sort drops every row, and its dispatch and combine set
*poisoned* flags, which name what is lost and end every wait. They store nothing else on other
ranks: one that is merely late may still read what this rank stored in an earlier call. A combine
that meets a time-out or a poisoned flag writes NaN. So all living ranks learn of the loss, and none
returns a plausible result.

Occupancy. A kernel that waits must not keep out a kernel that another rank on the same GPU, or
another object, waits for. One CTA of dispatch waits at most. Kernels that wait let the next kernel
of the stream start only after their wait. Combine uses little shared memory, and a CTA stores its
share before it waits. Its CTAs can fill an H200 while they wait: ranks that share a GPU in one
process need fewer.
"""
