/* The CRCs with which S3 keeps objects. All are reflected, start with ones and are inverted at
 * the end, so one algorithm serves them; only the polynomial differs. */

#ifndef FUSEFS_CRC_H
#define FUSEFS_CRC_H

#include <stddef.h>
#include <stdint.h>

enum crc_kind { CRC32, CRC32C, CRC64NVME, CRC_KINDS };

/* Makes the tables; call it once, before all else. */
void crc_prepare(void);

/* The CRC of data that follows data with the CRC `crc` (0: of nothing). */
uint64_t crc_of(enum crc_kind kind, uint64_t crc, const void *data, size_t size);

#endif
