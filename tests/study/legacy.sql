BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	"plan" INTEGER NOT NULL, 
	node INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	num_bytes BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	revision BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY ("plan", node, epoch), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
INSERT INTO "checkpoints" VALUES(1,0,2,'45ae0033460564d2a926d8c8/0-2.safetensors',712,'8b57a54e7ba4677c23d818567595e32f',2);
INSERT INTO "checkpoints" VALUES(1,1,4,'45ae0033460564d2a926d8c8/1-4.safetensors',712,'6c3196f68ac3439449cf0384bd878be9',2);
INSERT INTO "checkpoints" VALUES(1,2,2,'45ae0033460564d2a926d8c8/2-2.safetensors',712,'08611ce668c4a1d09528c236882a611c',2);
INSERT INTO "checkpoints" VALUES(1,2,4,'45ae0033460564d2a926d8c8/2-4.safetensors',712,'0779eb035ac94dcbf4a8b35499eb0cf6',2);
INSERT INTO "checkpoints" VALUES(1,0,4,'45ae0033460564d2a926d8c8/0-4.safetensors',712,'80b92778617ca50035485892468faf8f',2);
INSERT INTO "checkpoints" VALUES(2,0,2,'836d11801634ae3b85778689/0-2.safetensors',712,'52e6f48abfb8cce597ecfab0ae0c684c',1);
INSERT INTO "checkpoints" VALUES(2,1,4,'836d11801634ae3b85778689/1-4.safetensors',712,'7a01bf86daafde4a3b642faf6874c04b',1);
INSERT INTO "checkpoints" VALUES(2,2,1,'836d11801634ae3b85778689/2-1.safetensors',712,'10c9216dde303ee2b98899af70052b96',1);
CREATE TABLE claims (
	"plan" INTEGER NOT NULL, 
	node INTEGER NOT NULL, 
	start INTEGER NOT NULL, 
	stop INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	PRIMARY KEY ("plan", node), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
CREATE TABLE curves (
	"key" VARCHAR(64) NOT NULL, 
	device TEXT NOT NULL, 
	structure TEXT NOT NULL, 
	curves JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE TABLE epochs (
	"plan" INTEGER NOT NULL, 
	node INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	metrics TEXT NOT NULL, 
	seconds FLOAT NOT NULL, 
	worker TEXT NOT NULL, 
	seconds_alone FLOAT, 
	study INTEGER, 
	revision BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY ("plan", node, epoch), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
INSERT INTO "epochs" VALUES(1,0,1,'{"train_loss": 3.26495099067688, "mse": 0.6810585856437683}',0.00792765300047904,'cpu-0',NULL,1,1);
INSERT INTO "epochs" VALUES(1,0,2,'{"train_loss": 0.4078525900840759, "mse": 0.17076382040977478}',1.9998249999844119884e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,1,3,'{"train_loss": 0.16345658898353577, "mse": 0.14905819296836853}',2.395143000285315793e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,1,4,'{"train_loss": 0.14355571568012238, "mse": 0.13214832544326782}',5.70676000006642425432e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,2,1,'{"train_loss": 3.968623638153076, "mse": 1.8711066246032715}',1.66943400017771637067e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,2,2,'{"train_loss": 1.3243322372436523, "mse": 0.764382004737854}',0.00555648600038694,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,2,3,'{"train_loss": 0.584097146987915, "mse": 0.35292065143585205}',1.86076799946022219955e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,2,4,'{"train_loss": 0.28331542015075684, "mse": 0.18641597032546997}',1.38655299997481051832e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,0,3,'{"train_loss": 0.11037181317806244, "mse": 0.030788449570536613}',1.56351599980553146451e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(1,0,4,'{"train_loss": 0.020398007705807686, "mse": 0.005878460127860308}',7.60496299972146516665e-03,'cpu-0',NULL,1,2);
INSERT INTO "epochs" VALUES(2,0,1,'{"train_loss": 1.8838090896606445, "mse": 0.8264172077178955}',1.78309300008550053462e-03,'cpu-0',NULL,2,1);
INSERT INTO "epochs" VALUES(2,0,2,'{"train_loss": 0.5794538259506226, "mse": 0.16304881870746613}',1.33213100070861401036e-03,'cpu-0',NULL,2,1);
INSERT INTO "epochs" VALUES(2,1,3,'{"train_loss": 0.15548674762248993, "mse": 0.14390267431735992}',1.47677699987980304285e-03,'cpu-0',NULL,2,1);
INSERT INTO "epochs" VALUES(2,1,4,'{"train_loss": 0.13810530304908752, "mse": 0.12765643000602722}',1.32571199992526089772e-03,'cpu-0',NULL,2,1);
INSERT INTO "epochs" VALUES(2,2,1,'{"train_loss": 2.132776975631714, "mse": 1.4457646608352661}',1.41534600061277160421e-03,'cpu-0',NULL,2,1);
CREATE TABLE leases (
	study INTEGER NOT NULL, 
	"plan" INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	shared BOOLEAN NOT NULL, 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	pid_started TEXT NOT NULL, 
	since FLOAT NOT NULL, 
	heartbeat FLOAT NOT NULL, 
	PRIMARY KEY (study), 
	FOREIGN KEY(study) REFERENCES studies (id) ON DELETE CASCADE, 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
CREATE TABLE log (
	id INTEGER NOT NULL, 
	study INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	trial INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	value FLOAT, 
	at FLOAT NOT NULL, 
	config JSON, 
	PRIMARY KEY (id), 
	FOREIGN KEY(study) REFERENCES studies (id) ON DELETE CASCADE
);
INSERT INTO "log" VALUES(1,1,'asked',0,4,NULL,1.79536460625158739092e+09,NULL);
INSERT INTO "log" VALUES(2,1,'asked',1,4,NULL,1.79536460625158739092e+09,NULL);
INSERT INTO "log" VALUES(3,1,'asked',2,4,NULL,1.79536460625158739092e+09,NULL);
INSERT INTO "log" VALUES(4,1,'reported',1,4,1.32148325443267822265e-01,1.7953646063198189735e+09,NULL);
INSERT INTO "log" VALUES(5,1,'reported',2,4,1.86415970325469970703e-01,1.7953646063198189735e+09,NULL);
INSERT INTO "log" VALUES(6,1,'reported',0,4,5.87846012786030769348e-03,1.7953646063198189735e+09,NULL);
INSERT INTO "log" VALUES(7,2,'asked',0,4,NULL,1.79536460643111324313e+09,NULL);
INSERT INTO "log" VALUES(8,2,'asked',1,4,NULL,1.79536460643111324313e+09,NULL);
INSERT INTO "log" VALUES(9,2,'asked',2,4,NULL,1.79536460643111324313e+09,NULL);
INSERT INTO "log" VALUES(10,2,'reported',1,4,1.27656430006027221679e-01,1.79536460643111324313e+09,NULL);
CREATE TABLE nodes (
	"plan" INTEGER NOT NULL, 
	node INTEGER NOT NULL, 
	parent INTEGER, 
	start INTEGER NOT NULL, 
	config JSON NOT NULL, 
	epochs INTEGER NOT NULL, 
	revision BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY ("plan", node), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
INSERT INTO "nodes" VALUES(1,0,NULL,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.1}}}',4,1);
INSERT INTO "nodes" VALUES(1,1,0,2,'{"lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2], "gamma": 0.1, "every": null}}}',4,1);
INSERT INTO "nodes" VALUES(1,2,NULL,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.05}}}',4,1);
INSERT INTO "nodes" VALUES(2,0,NULL,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.1}}}',4,1);
INSERT INTO "nodes" VALUES(2,1,0,2,'{"lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2], "gamma": 0.1, "every": null}}}',4,1);
INSERT INTO "nodes" VALUES(2,2,NULL,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.05}}}',4,1);
CREATE TABLE plans (
	id INTEGER NOT NULL, 
	identity VARCHAR(64) NOT NULL, 
	task TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	revision BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (identity)
);
INSERT INTO "plans" VALUES(1,'45ae0033460564d2a926d8c8','Legacy',1.79536460504119205474e+09,2);
INSERT INTO "plans" VALUES(2,'836d11801634ae3b85778689','Legacy',1.79536460636545848849e+09,1);
CREATE TABLE priors (
	study INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	config JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	target INTEGER NOT NULL, 
	metrics TEXT NOT NULL, 
	PRIMARY KEY (study, number), 
	FOREIGN KEY(study) REFERENCES studies (id) ON DELETE CASCADE
);
CREATE TABLE stages (
	id INTEGER NOT NULL, 
	"plan" INTEGER NOT NULL, 
	node INTEGER NOT NULL, 
	start INTEGER NOT NULL, 
	stop INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	started_at FLOAT NOT NULL, 
	seconds FLOAT NOT NULL, 
	error TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
INSERT INTO "stages" VALUES(1,1,0,0,2,'cpu-0','done',1.79536460625054788585e+09,3.22148799896240234375e-02,'');
INSERT INTO "stages" VALUES(2,1,1,2,4,'cpu-0','done',1.79536460626694750787e+09,1.586818695068359375e-02,'');
INSERT INTO "stages" VALUES(3,1,2,0,2,'cpu-0','done',1.79536460628513669965e+09,1.75378322601318359375e-02,'');
INSERT INTO "stages" VALUES(4,1,2,2,4,'cpu-0','done',1.79536460629095315937e+09,1.174259185791015625e-02,'');
INSERT INTO "stages" VALUES(5,1,0,2,4,'cpu-0','done',1.79536460630507326129e+09,1.36773586273193359375e-02,'');
INSERT INTO "stages" VALUES(6,2,0,0,2,'cpu-0','done',1.79536460641998219488e+09,7.2386264801025390625e-03,'');
INSERT INTO "stages" VALUES(7,2,1,2,4,'cpu-0','done',1795364606.42165,5.6145191192626953125e-03,'');
INSERT INTO "stages" VALUES(8,2,2,0,1,'cpu-0','done',1.79536460642917323118e+09,0.00102996826171875,'');
CREATE TABLE studies (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	"plan" INTEGER NOT NULL, 
	spec JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	created_at FLOAT NOT NULL, 
	batch BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name), 
	FOREIGN KEY("plan") REFERENCES plans (id)
);
INSERT INTO "studies" VALUES(1,'done',1,'{"task": {"class": "tests.study.legacy_task.Legacy", "source": "311fb724c94007bbe957d423", "attributes": "[(''shift'', ''0.0'')]", "version": ""}, "space": {"lr": "Choice(options=(Constant(0.1), Step(0.1, (2,)), Constant(0.05)), conditions=())"}, "algorithm": "GridSearch(max_epochs=4, levels=5)", "max_epochs": 4, "metric": "mse", "mode": "min", "seed": 0, "file": null}','done',1.79536460504799556727e+09,4);
INSERT INTO "studies" VALUES(2,'stopped',2,'{"task": {"class": "tests.study.legacy_task.Legacy", "source": "311fb724c94007bbe957d423", "attributes": "[(''shift'', ''0.0'')]", "version": ""}, "space": {"lr": "Choice(options=(Constant(0.1), Step(0.1, (2,)), Constant(0.05)), conditions=())"}, "algorithm": "GridSearch(max_epochs=4, levels=5)", "max_epochs": 4, "metric": "mse", "mode": "min", "seed": 1, "file": null}','stopped',1.7953646063833034038e+09,3);
CREATE TABLE thrifty_version (
	version_num VARCHAR(32) NOT NULL, 
	PRIMARY KEY (version_num)
);
INSERT INTO "thrifty_version" VALUES('0004');
CREATE TABLE trials (
	study INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	config JSON NOT NULL, 
	node INTEGER NOT NULL, 
	"group" JSON NOT NULL, 
	parent JSON, 
	state VARCHAR(16) NOT NULL, 
	target INTEGER NOT NULL, 
	reached INTEGER NOT NULL, 
	value FLOAT, 
	error JSON, 
	objectives JSON, 
	violation FLOAT, 
	PRIMARY KEY (study, number), 
	FOREIGN KEY(study) REFERENCES studies (id) ON DELETE CASCADE
);
INSERT INTO "trials" VALUES(1,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.1}}}',0,0,'null','waiting',4,4,5.87846012786030769348e-03,'null',NULL,NULL);
INSERT INTO "trials" VALUES(1,1,'{"lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2], "gamma": 0.1, "every": null}}}',1,0,'null','waiting',4,4,1.32148325443267822265e-01,'null',NULL,NULL);
INSERT INTO "trials" VALUES(1,2,'{"lr": {"schedule": "Constant", "fields": {"value": 0.05}}}',2,0,'null','waiting',4,4,1.86415970325469970703e-01,'null',NULL,NULL);
INSERT INTO "trials" VALUES(2,0,'{"lr": {"schedule": "Constant", "fields": {"value": 0.1}}}',0,0,'null','running',4,0,NULL,'null',NULL,NULL);
INSERT INTO "trials" VALUES(2,1,'{"lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2], "gamma": 0.1, "every": null}}}',1,0,'null','waiting',4,4,1.27656430006027221679e-01,'null',NULL,NULL);
INSERT INTO "trials" VALUES(2,2,'{"lr": {"schedule": "Constant", "fields": {"value": 0.05}}}',2,0,'null','running',4,0,NULL,'null',NULL,NULL);
CREATE INDEX ix_claims_owner ON claims (owner);
CREATE INDEX epochs_revision ON epochs ("plan", revision);
CREATE INDEX checkpoints_revision ON checkpoints ("plan", revision);
CREATE INDEX ix_stages_plan ON stages ("plan");
CREATE INDEX ix_leases_plan ON leases ("plan");
CREATE INDEX trials_status ON trials (study, state, value, number, target, violation);
CREATE INDEX ix_log_study ON log (study);
COMMIT;
