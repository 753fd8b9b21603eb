/* Which bytes are block scales of NVFP4: E4M3 numbers without a sign that are not NaN. For C and CUDA. */
#ifndef AQ_COMMON_SCALES_H
#define AQ_COMMON_SCALES_H

#define AQ_FIRST_INVALID_SCALE 0x7fu /* NaN; larger bytes have a sign */

#endif
