"""Weights in registers: packed 4- and 8-bit values and their block scales to bf16 wgmma A
fragments.

The layouts are ``packing.py``'s. Per 16 of K a thread makes four registers, two bf16 each: (row g |
row g + 8) x (k 2c.. | k 2c + 8..), which is the order of an m64k16 A fragment.
"""

from cutlass import Int32, cute

from moe_ep_jit.kernels.common import ptx


class NvFp4:
    """E2M1 in bit planes and recoded E4M3 scales; the product is the weight times 2^-20, exactly.

    Four codes share a 16-bit half so that a mask, or a shift and a mask, puts sign and magnitude at
    a bf16's bits 15 and 8..6: there an E2M1 code reads as its value times 2^-126, its subnormal 0.5
    included.
    """

    blob_bytes = 4608
    words_per_half = 4  # of a thread, per 64 of K
    scale_words = 4  # of a thread, per 128 of K

    @staticmethod
    def load_words(blob, half, thread, out):
        """One thread's packed values of 64 of K. blob: shared address of 64 rows x 128 of K"""
        src = ptx.vector(Int32, blob + (half * 128 + thread) * 16, 4, ptx.SMEM)
        cute.autovec_copy(src, out)

    @staticmethod
    def load_scales(blob, thread, out):
        """Scales of the thread's two rows for 128 of K."""
        warp_row = (thread // 32) * 8 + (thread % 32) // 4
        src = ptx.vector(Int32, blob + 4096 + warp_row * 16, 4, ptx.SMEM)
        cute.autovec_copy(src, out)

    @staticmethod
    def decode(words, scales, k16, fragment, block):
        """Fill ``fragment[.., block]`` with 16 of K; ``k16`` is their place within the 128."""
        word = words[k16 % 4]
        pair = scales[k16 // 2]
        if k16 % 2 == 1:
            pair = ptx.swap_bytes_in_halves(pair)
        # The stored byte is the scale's exponent and mantissa; the constant makes it the scale
        # times 2^106.
        pair = ptx.and_or(pair, Int32(0x0FF00FF0), Int32(0x70007000))
        sign_and_magnitude = 0x81C081C0
        plane0 = ptx.and_const(word, sign_and_magnitude)
        plane1 = ptx.and_const(ptx.shift_left(word, 3), sign_and_magnitude)
        # Field 6 low, sign 1 low: times 2 + 64 shifts both at once, and the masks keep the copies
        # apart.
        plane2 = ptx.and_const(
            ptx.mul_const(ptx.and_const(word, 0x40074007), 66), sign_and_magnitude
        )
        plane3 = ptx.and_or(
            ptx.shift_right(word, 3),
            Int32(0x01C001C0),
            ptx.and_const(ptx.shift_left(word, 2), 0x80008000),
        )
        fragment[(0, 0, 0), 0, block] = ptx.mul_bf16x2_by_low(plane0, pair)
        fragment[(0, 1, 0), 0, block] = ptx.mul_bf16x2_by_high(plane1, pair)
        fragment[(0, 0, 1), 0, block] = ptx.mul_bf16x2_by_low(plane2, pair)
        fragment[(0, 1, 1), 0, block] = ptx.mul_bf16x2_by_high(plane3, pair)


class MxFp8:
    """E4M3 and its UE8M0 scales relative to the row's largest, exactly.

    An E4M3's bits at a bf16's 15 and 10..4 read as its value times 2^-120; the scale byte carries
    2^120 more.
    """

    blob_bytes = 8448
    words_per_half = 8
    scale_words = 2

    @staticmethod
    def load_words(blob, half, thread, out):
        src = ptx.vector(Int32, blob + (half * 128 + thread) * 32, 8, ptx.SMEM)
        cute.autovec_copy(src, out)

    @staticmethod
    def load_scales(blob, thread, out):
        warp_row = (thread // 32) * 8 + (thread % 32) // 4
        src = ptx.vector(Int32, blob + 8192 + warp_row * 8, 2, ptx.SMEM)
        cute.autovec_copy(src, out)

    @staticmethod
    def decode(words, scales, k16, fragment, block):
        for rh in range(2):
            word = words[2 * (k16 % 4) + rh]
            # The block's byte is the exponent field of a bf16 whose other bits are 0.
            exponent = ptx.and_const(
                ptx.shift_right(scales[rh], 8 * (k16 // 2)) if k16 >= 2 else scales[rh], 0xFF
            )
            scale = ptx.shift_left(exponent, 7)
            low_k = ptx.and_or(
                ptx.shift_left(word, 4),
                Int32(0x07F007F0),
                ptx.and_const(ptx.shift_left(word, 8), 0x80008000),
            )
            high_k = ptx.and_or(
                ptx.shift_right(word, 4), Int32(0x07F007F0), ptx.and_const(word, 0x80008000)
            )
            fragment[(0, rh, 0), 0, block] = ptx.mul_bf16x2_by_low(low_k, scale)
            fragment[(0, rh, 1), 0, block] = ptx.mul_bf16x2_by_low(high_k, scale)


DECODERS = {"nvfp4": NvFp4, "mxfp8_exact": MxFp8}
